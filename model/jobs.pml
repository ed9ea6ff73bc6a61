/* A job: many messages, all or none (docs/protocol.md, "Jobs"; dropq/staging/jobs.py).

   Two drivers run the same job of two messages, each with an attempt of its own, beside a sweep; with TWO_SWEEPS one
   driver runs it beside two. A sweep rolls forward what is committed and drops what is not, at any time. Anybody may
   die at any step: to be dead is to make no further step. At any moment a last sweep finds all others dead, and what it
   leaves behind is judged. Each step is one call of the file system.

   A folder is working/.job-ID, or has a name of its own, .drop-ID-RANDOM. Such a name never comes again: who remembers
   one that the folder had before will find nothing. */

#define DRIVERS   2
#define PARTIES   5                     /* two drivers, two sweeps, the last sweep */
#define LAST      4

#define NOWHERE   0                     /* what a folder is called: nothing, it is removed, or was never made; */
#define JOB       1                     /* working/.job-ID; */
#define DROP(o)   (o + 2)               /* .drop-ID-RANDOM of this folder; */
#define GONE      4                     /* a name that no folder will have again */

#define FILES     4
#define FILE(run, i) (2 * (run) + i)    /* each run stages both messages anew, under names of its own */

typedef Dir {
	byte name;
	byte manifest;                  /* 1 + the run whose files it lists; 0 for none */
	bool attempt[DRIVERS];
	bool draft[DRIVERS];
	bool file[FILES]
};

Dir dir[DRIVERS];                       /* the folder that a driver's mkdir made */
bool target[FILES];
bool ledger;

byte at[PARTIES];                       /* the path of the folder that somebody is about */
bool listed[4];                         /* the dropped folders that a driver has listed: 2 * driver + folder */

byte committed;                         /* 1 + the run whose manifest was put in place */
mtype = { SENT, SENT_BEFORE, NOT_SENT };
mtype told[DRIVERS];                    /* what a driver was told, if it lives to hear it */
bool closed;                            /* all are dead; the last sweep is through */

#define ALL(run)  (target[FILE(run, 0)] && target[FILE(run, 1)])
#define NONE(run) (!target[FILE(run, 0)] && !target[FILE(run, 1)])
#define THERE     (o < DRIVERS)
#define HAS(o, run) (dir[o].file[FILE(run, 0)] || dir[o].file[FILE(run, 1)])

/* Find the folder that has a name now: `o`. */
inline find(path)
{
	if
	:: path == dir[0].name -> o = 0
	:: path == dir[1].name -> o = 1
	:: else -> o = DRIVERS
	fi
}

/* Rename a folder to a drop name of its own: whatever it was called before is no name any more. */
inline rename_away()
{
	d_step {
		find(at[me]);
		there = THERE;
		if
		:: there ->
			if :: at[0] == DROP(o) -> at[0] = GONE :: else fi;
			if :: at[1] == DROP(o) -> at[1] = GONE :: else fi;
			if :: at[2] == DROP(o) -> at[2] = GONE :: else fi;
			if :: at[3] == DROP(o) -> at[3] = GONE :: else fi;
			listed[o] = false;
			listed[2 + o] = false;
			dir[o].name = DROP(o);
			dir[o].attempt[0] = false; /* from here on nobody comes to what lies in it by the job's name */
			dir[o].attempt[1] = false;
			dir[o].draft[0] = false;
			dir[o].draft[1] = false;
			at[me] = DROP(o)
		:: else
		fi;
		o = 0
	}
}

/* Remove a folder: its manifest and its attempts in any order. It was opened, and is emptied whatever it is called. */
inline remove_tree()
{
	d_step { find(at[me]); tree = o; o = 0 };
	do
	:: d_step { tree < DRIVERS && dir[tree].manifest -> dir[tree].manifest = 0 }
	:: d_step { tree < DRIVERS && HAS(tree, 0) -> dir[tree].file[FILE(0, 0)] = false; dir[tree].file[FILE(0, 1)] = false }
	:: d_step { tree < DRIVERS && HAS(tree, 1) -> dir[tree].file[FILE(1, 0)] = false; dir[tree].file[FILE(1, 1)] = false }
	:: atomic { else ->
		if
		:: tree < DRIVERS && dir[tree].name == at[me] -> dir[tree].name = NOWHERE
		:: else
		fi;
		tree = 0;
		break }
	od
}

/* Rename a staged file into target/: one that is not there was sent by another, or is where the folder is by now. */
inline send(i)
{
	d_step {
		find(at[me]);
		if
		:: THERE && dir[o].file[FILE(manifest - 1, i)] ->
			dir[o].file[FILE(manifest - 1, i)] = false;
			target[FILE(manifest - 1, i)] = true
		:: else
		fi;
		o = 0;
		/* Promise: no message of the job is sent twice. */
		assert(!(target[FILE(0, i)] && target[FILE(1, i)]))
	}
}

inline read_manifest()
{
	d_step {
		find(at[me]);
		manifest = 0;
		if
		:: THERE -> manifest = dir[o].manifest
		:: else
		fi;
		o = 0
	}
}

/* Roll a committed job forward and remove its folder; any number may do this at once. */
inline finish()
{
	do
	:: true ->
		atomic { read_manifest(); if :: !manifest -> break :: else fi };
		atomic { find(at[me]); there = THERE; o = 0; if :: !there -> break :: else fi }; /* sync it */
		send(0);
		send(1);
		atomic { ledger = true; finished = true };
		atomic { rename_away(); if :: !there -> break :: else fi };
		d_step { find(at[me]); there = (THERE && HAS(o, manifest - 1)); o = 0 };
		if
		:: there /* something is left that it lists: finish it under its new name */
		:: else -> remove_tree(); break
		fi
	od
}

/* Drop a job that was given up, unless it is committed in this moment. */
inline drop()
{
#ifdef LOOK_THEN_DROP
	/* Broken on purpose, so that the assertions are seen to fail: it looks for a manifest first and renames the folder
	   away then, while the driver puts its manifest in place in between. */
	finish();
	if
	:: !finished -> rename_away(); remove_tree()
	:: else
	fi
#else
	rename_away();
	if
	:: there ->
		finish();
		if
		:: !finished -> remove_tree()
		:: else
		fi
	:: else
	fi
#endif
}

inline forget()
{
	atomic { at[me] = NOWHERE; finished = false; there = false; manifest = 0 }
}

inline list_dropped()
{
	d_step {
		listed[2 * me] = (dir[0].name == DROP(0));
		listed[2 * me + 1] = (dir[1].name == DROP(1))
	}
}

/* Tell whether the job was committed: a manifest first, then the ledger, which is written before the manifest goes. */
inline look_whether_sent()
{
	list_dropped();
	atomic { at[me] = JOB; read_manifest(); sent = (manifest > 0) };
	atomic { at[me] = DROP(0); read_manifest(); sent = (sent || (listed[2 * me] && manifest > 0)) };
	atomic { at[me] = DROP(1); read_manifest(); sent = (sent || (listed[2 * me + 1] && manifest > 0)) };
	atomic { sent = (sent || ledger); at[me] = NOWHERE; manifest = 0; listed[2 * me] = false; listed[2 * me + 1] = false }
}

#define STAGED (dir[o].attempt[me] && dir[o].file[FILE(me, 0)] && dir[o].file[FILE(me, 1)])

proctype driver(byte me) provided (!closed)
{
	byte o, manifest, tree;
	bool there, finished, sent;

	d_step { /* make the folder; that it is there is no error */
		find(JOB);
		if
		:: !THERE -> dir[me].name = JOB
		:: else
		fi;
		o = 0
	};
	atomic { /* make the attempt's folder in it */
		find(JOB);
		if
		:: THERE -> dir[o].attempt[me] = true; o = 0
		:: else -> o = 0; goto refused
		fi
	};
	atomic { /* stage a message */
		find(JOB);
		if
		:: THERE && dir[o].attempt[me] -> dir[o].file[FILE(me, 0)] = true; o = 0
		:: else -> o = 0; goto refused
		fi
	};
	atomic { /* and the other */
		find(JOB);
		if
		:: THERE && dir[o].attempt[me] -> dir[o].file[FILE(me, 1)] = true; o = 0
		:: else -> o = 0; goto refused
		fi
	};
	look_whether_sent();
	if
	:: sent -> goto sent_before
	:: else
	fi;
	atomic { /* write the manifest under another name */
		find(JOB);
		if
		:: THERE -> dir[o].draft[me] = true; o = 0
		:: else -> o = 0; goto refused
		fi
	};
	atomic { /* look whether all the files are there */
		find(JOB);
		if
		:: THERE && STAGED -> o = 0
		:: else -> o = 0; goto refused
		fi
	};
	atomic { /* commit: the rename replaces nothing */
		find(JOB);
		if
		:: THERE && dir[o].draft[me] && !dir[o].manifest ->
			dir[o].draft[me] = false;
			dir[o].manifest = me + 1;
			o = 0;
			/* Promise: a job is committed once. */
			assert(!committed);
			committed = me + 1
		:: else -> o = 0; goto refused
		fi
	};
	at[me] = JOB;
	finish();
	atomic { told[me] = SENT; forget() };
	goto others;

refused:
	look_whether_sent();
	if
	:: sent -> goto sent_before
	:: !sent -> told[me] = NOT_SENT; goto done
	:: !sent -> told[me] = NOT_SENT /* and tidies up, as after any failure */
	fi;
	goto abort;
sent_before:
	atomic { told[me] = SENT_BEFORE; sent = false };
abort:
	at[me] = JOB;
	drop();
	forget();
others:
	list_dropped();
	do
	:: atomic { listed[2 * me] -> listed[2 * me] = false; at[me] = DROP(0) }; finish(); forget()
	:: atomic { listed[2 * me + 1] -> listed[2 * me + 1] = false; at[me] = DROP(1) }; finish(); forget()
	:: else -> break
	od;
	/* Promise: a driver that is told "sent" finds all there, and one that was told that another run sent them too. */
	assert(told[me] != SENT || (ledger && ALL(me)));
	assert(told[me] != SENT_BEFORE || ALL(0) || ALL(1));
done:
	skip
}

/* Takes one folder after the other, finishes those with a manifest, and drops the rest, which it is told are old. */
proctype sweep(byte me) provided (!closed)
{
	byte o, manifest, tree;
	bool there, finished;

end:	do
	:: atomic {
		if
		:: dir[0].name -> at[me] = dir[0].name
		:: dir[1].name -> at[me] = dir[1].name
		fi;
		read_manifest() };
		if
		:: manifest -> finish()
		:: else -> drop()
		fi;
		forget()
	od
}

/* All others are dead: sweep once more, and see. */
proctype last_sweep(byte me)
{
	byte o, manifest, tree;
	bool there, finished;

	atomic {
		closed = true;
		do
		:: dir[0].name -> at[me] = dir[0].name; drop(); forget()
		:: dir[1].name -> at[me] = dir[1].name; drop(); forget()
		:: else -> break
		od;
		/* Promise: all of a job's messages are in target/, or none; all where its manifest was put in place. */
		assert(committed == 1 -> ALL(0) : NONE(0));
		assert(committed == 2 -> ALL(1) : NONE(1));
		/* Promise: a driver that was told "sent" finds all there, and one that was told "nothing was sent" none. */
		assert(told[0] != SENT || ALL(0));
		assert(told[1] != SENT || ALL(1));
		assert(told[0] != NOT_SENT || NONE(0));
		assert(told[1] != NOT_SENT || NONE(1))
	};
end:	do
	:: closed /* nothing more happens */
	od
}

init
{
	atomic {
		run driver(0);
		run sweep(2);
#ifdef TWO_SWEEPS
		run sweep(3);
#else
		run driver(1);
#endif
		run last_sweep(LAST)
	}
}
