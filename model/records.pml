/* Records: what becomes of the records of one message is settled by one commit.

   A bundle is a message of a few records. Two holders claim what lies in target/, each time under a new name, and settle
   some of its records. They stage what becomes of them as parts in a folder that is new for each attempt: one for error/,
   one for processed/, and what is left, for target/. The commit renames the claim to `whole` in that folder. From then on
   anybody moves the parts; `whole` goes last. What is left is a message again, a smaller bundle: it is claimed and settled
   in the same way, also while the `whole` before it is still there. Or nothing is settled, and the bundle is cut in two.

   A sweep rolls committed folders forward, and drops the others, once their claim is gone, by `mkdir whole`. Others give
   claims back at any step (a sweep that takes the living for dead, or somebody with `mv`), extend them, and acknowledge
   the whole bundle by its id.

   Each step is one call of the file system. Anybody may die at any step: to be dead is to make no further step, and
   another may take the place of a holder that has committed. What a last sweep would leave if all were dead is judged
   after every change. The rename of the commit may be answered by ENOENT although it was done, as on NFS.

   Message files share no record, so that a file is called by the lowest record in it. One thing bounds the search: beside
   the folders of the holders' attempts there is one that was given up. A holder that would give up another waits until the
   first is removed, or until it holds nothing but its fence and no sweep is about it; then it is forgotten. */

#ifdef TWO_SWEEPS
#define RECORDS   2
#else
#define RECORDS   3
#endif
#define ALL       ((1 << RECORDS) - 1)  /* sets of records: one bit for each */

#define OLD_ONE   2                     /* the folder of an attempt that was given up, after one for each holder */
#define NONE      3                     /* a folder that is not there */

#define TARGET    0                     /* where a message file lies: in target/, or claimed, by 1 + a holder */

#define NOTHING   0                     /* what is called `whole` in a folder: nothing, */
#define MESSAGE   1                     /* the message, */
#define FENCE     2                     /* or a folder */

#define FORGOTTEN 0                     /* what a holder remembers of its claim: nothing, */
#define CURRENT   1                     /* its name, */
#define EXTENDED  2                     /* the name that it had before somebody extended it, */
#define GONE      3                     /* or one that no file will have again */

#define ERROR     0                     /* the parts: the record that failed, */
#define PROCESSED 1                     /* what was acknowledged, where something is left, */
#define LEFT      2                     /* what is left, */
#define LATER     3                     /* and where it was cut in two, the other half */
#define PARTS     4

#ifdef TWO_SWEEPS
#define SWEEPS    2
#else
#define SWEEPS    1
#endif

typedef Folder {
	bool there;
	byte claimed;                   /* 1 + the file whose claim it is named after, while that is in processing/ */
	byte part[PARTS];               /* the records in each part that lies in it */
	byte whole;
	byte loose;                     /* the state folders that a part was moved to and that were not synced since */
	bool away                       /* it has another name, with RENAME_AWAY */
};

Folder folder[4];                       /* the first two are those of the holders' attempts, the last is never there */

byte mask[3];                           /* the records in a message file, 0 where there is no such file */
byte place[3];                          /* where it lies */
byte acknowledged;                      /* the records that were acknowledged, archived or gone, */
byte failed;                            /* and those in error/ */

byte first_plan;                        /* what becomes of the records of the bundle as it was sent, */
byte second_plan;                       /* and of a smaller one, whoever has it */

byte memory[2];                         /* by a holder: its claim */
byte at[SWEEPS];                        /* the folder that a sweep is about */
#ifdef PROCESSING_FIRST
byte saw[SWEEPS];                       /* the claims that it saw, a bit for each file */
#endif

byte i;                                 /* scratch: 0 between two steps */

#define THERE(f)      (folder[f].there && !folder[f].away)
#define PART(f, k)    folder[f].part[k]
#define ANY_PART(f)   (PART(f, ERROR) || PART(f, PROCESSED) || PART(f, LEFT) || PART(f, LATER))
#define COMMITTED(f)  (folder[f].whole == MESSAGE)

/* -- the promises ------------------------------------------------------------------------------------------------- */

/* What the parts of a committed folder hold: a last sweep moves them. What else is staged it drops. */
#define SUM(f)   (COMMITTED(f) * (PART(f, ERROR) + PART(f, PROCESSED) + PART(f, LEFT) + PART(f, LATER)))
#define UNION(f) (COMMITTED(f) * (PART(f, ERROR) | PART(f, PROCESSED) | PART(f, LEFT) | PART(f, LATER)))

#define IN_SUM   (acknowledged + failed + mask[0] + mask[1] + mask[2] + SUM(0) + SUM(1) + SUM(2))
#define IN_UNION (acknowledged | failed | mask[0] | mask[1] | mask[2] | UNION(0) | UNION(1) | UNION(2))

/* What is true after every change: all may be dead from here on, and a last sweep comes. */
inline promises()
{
	/* Promise: each record is in one place: in one message that waits or is claimed, acknowledged, in error/, or in one
	   part of what is committed. So none is lost, none is in error/ twice, none that was settled is handed out again. */
	assert(IN_SUM == ALL && IN_UNION == ALL)
}

/* -- names -------------------------------------------------------------------------------------------------------- */

#ifdef TWO_SWEEPS
#define ABOUT(f) (at[0] == f || at[1] == f)
#else
#define ABOUT(f) (at[0] == f)
#endif

/* Remove a folder. Its name never comes again: a sweep that is about it will find nothing. */
inline vanish(f)
{
	folder[f].there = false;
	folder[f].claimed = 0;
	for (i : 0 .. PARTS - 1) {
		folder[f].part[i] = 0
	}
	folder[f].whole = NOTHING;
	folder[f].loose = 0;
	folder[f].away = false;
	for (i : 0 .. SWEEPS - 1) {
		at[i] = (at[i] == f -> NONE : at[i])
	}
	i = 0
}

/* It holds nothing but its fence, and no sweep is about it: who comes upon it leaves it alone. */
#define INERT(f) (folder[f].whole == FENCE && !ANY_PART(f) && !ABOUT(f))

/* The holder is about another folder from here on. */
inline give_up(f)
{
	if
	:: folder[f].there && !INERT(f) ->
		folder[OLD_ONE].there = true;
		folder[OLD_ONE].claimed = folder[f].claimed;
		for (i : 0 .. PARTS - 1) {
			folder[OLD_ONE].part[i] = folder[f].part[i]
		}
		folder[OLD_ONE].whole = folder[f].whole;
		folder[OLD_ONE].loose = folder[f].loose;
		folder[OLD_ONE].away = folder[f].away;
		for (i : 0 .. SWEEPS - 1) {
			at[i] = (at[i] == f -> OLD_ONE : at[i])
		}
	:: else
	fi;
	vanish(f)
}

/* A claim leaves processing/: it has a name that no file will have again. */
inline lose_claim(s)
{
	memory[place[s] - 1] = (memory[place[s] - 1] == FORGOTTEN -> FORGOTTEN : GONE);
	for (i : 0 .. OLD_ONE) {
		folder[i].claimed = (folder[i].claimed == 1 + s -> 0 : folder[i].claimed)
	}
#ifdef PROCESSING_FIRST
	for (i : 0 .. SWEEPS - 1) {
		saw[i] = saw[i] & ~(1 << s)
	}
#endif
	i = 0;
	place[s] = TARGET
}

/* The message file ends, or becomes `whole`. */
inline leave(s)
{
	lose_claim(s);
	mask[s] = 0
}

/* -- what is done to a folder ------------------------------------------------------------------------------------- */

#define LOWEST(m) ((m) & 1 -> 0 : ((m) & 2 -> 1 : 2))

/* List a folder, and take the first part that lies in it; leave the loop if there is none. */
inline list(f)
{
	atomic {
		if
		:: !THERE(f) || !ANY_PART(f) -> break
		:: else ->
			do
			:: !folder[f].part[k] -> k++
			:: else -> break
			od
		fi
	}
}

#ifdef SYNC_OWN
#define STATE(k)  (1 << (k == LATER -> LEFT : k))
#define MOVED(k)  own = own | STATE(k);
#else
#define STATE(k)  1
#define MOVED(k)
#endif

/* Rename a part to its state: one that is gone was moved by another. */
inline move(f)
{
	d_step {
		if
		:: THERE(f) && folder[f].part[k] ->
			if
			:: k == ERROR ->
				/* Promise: no record is in error/ twice. */
				assert(!(failed & folder[f].part[k]));
				failed = failed | folder[f].part[k]
			:: k == PROCESSED -> acknowledged = acknowledged | folder[f].part[k]
			:: else -> mask[LOWEST(folder[f].part[k])] = folder[f].part[k]
			fi;
			folder[f].part[k] = 0;
			folder[f].loose = folder[f].loose | STATE(k);
			MOVED(k)
			promises()
		:: else
		fi;
		k = 0
	}
}

/* Sync all state folders, also those that only others moved parts to. */
inline sync(f)
{
	d_step {
#ifdef SYNC_OWN
		/* Broken on purpose: it syncs the folders that it has moved parts to itself. */
		folder[f].loose = folder[f].loose & ~own;
		own = 0
#else
		folder[f].loose = 0
#endif
	}
}

/* Unlink `whole`, or rename it to processed/: if it is gone, another was first. */
inline end_whole(f)
{
	d_step {
		if
		:: THERE(f) && folder[f].whole == MESSAGE ->
			folder[f].whole = NOTHING;
			promises();
			/* Promise: no power cut undoes the move of a part once `whole` is gone. */
			assert(!folder[f].loose)
		:: else ->
			/* Promise: nothing is archived but the message. */
			assert(!THERE(f) || folder[f].whole != FENCE)
		fi
	}
}

#ifdef FROM_MEMORY
#define THOSE(p) ((p[ERROR] -> 1 : 0) | (p[PROCESSED] -> 2 : 0) | (p[LEFT] -> 4 : 0) | (p[LATER] -> 8 : 0))

/* Broken on purpose: it takes the parts that it saw when it listed staged/, or has staged itself. */
inline recall()
{
	atomic {
		if
		:: !known -> break
		:: else ->
			do
			:: !(known & 1 << k) -> k++
			:: else -> break
			od;
			known = known & ~(1 << k)
		fi
	}
}
#endif

/* Move the parts of a committed folder, then end `whole`; any number may do this at once. */
inline roll_forward(f, dies)
{
#ifdef WHOLE_FIRST
	/* Broken on purpose: `whole` goes before a listing showed no part. */
	end_whole(f);
#endif
	do
#ifdef FROM_MEMORY
	:: recall(); move(f)
#else
	:: list(f); move(f)
#endif
	:: dies -> goto died
	od;
#ifdef SYNC_LATE
	/* Broken on purpose: `whole` goes before the folders that got a part were synced. */
	end_whole(f);
	sync(f)
#else
	sync(f);
	end_whole(f)
#endif
}

/* -- who takes part ----------------------------------------------------------------------------------------------- */

#define SOME_OF_EACH 1                  /* what a holder does: fail a record, ack one, leave the rest, */
#define ONE_FAILED   2                  /* fail a record, leave the rest, */
#define CHECKPOINT   3                  /* ack a record, leave the rest, */
#define NONE_LEFT    4                  /* fail a record, ack the rest: `whole` is archived as it is, */
#define CUT          5                  /* or settle nothing, and cut the bundle in two */

#define ONE(m)       ((m) & -(m))
#define REST(m)      ((m) & ((m) - 1))

/* Say which records of a bundle go into which part. */
inline decide(plan)
{
	if
	:: plan == SOME_OF_EACH -> want[ERROR] = ONE(m); want[PROCESSED] = ONE(REST(m)); want[LEFT] = REST(REST(m))
	:: plan == ONE_FAILED -> want[ERROR] = ONE(m); want[LEFT] = REST(m)
	:: plan == CHECKPOINT -> want[PROCESSED] = ONE(m); want[LEFT] = REST(m)
	:: plan == NONE_LEFT -> want[ERROR] = ONE(m)
	:: plan == CUT -> want[LEFT] = ONE(m); want[LATER] = REST(m)
	fi
}

/* The records without a part: they are acknowledged by `whole`. */
#define BY_WHOLE (m & ~(want[ERROR] | want[PROCESSED] | want[LEFT] | want[LATER]))

/* Go on to the next part that there will be, from `k` on. */
inline next_wanted()
{
	do
	:: k < PARTS && !want[k] -> k++
	:: else -> break
	od
}

#define MY folder[me]

proctype holder(byte me)
{
	byte s;                         /* the file that it claimed, */
	byte m;                         /* the records in it, */
	byte want[PARTS];               /* and those of each part */
	byte k;
	bool found;
	bool committed;
#ifdef FROM_MEMORY
	byte known;
#endif
#ifdef SYNC_OWN
	byte own;
#endif

end:
claim:
	atomic {
		if
		:: REST(mask[0]) && place[0] == TARGET -> s = 0
		:: REST(mask[1]) && place[1] == TARGET -> s = 1
		fi;
		m = mask[s];
		place[s] = me + 1;
		memory[me] = CURRENT;
		i = (m == ALL -> first_plan : second_plan);
		decide(i);
		i = 0
	};
make_folder:
	atomic {
		k = 0;
		if
		:: folder[OLD_ONE].there && INERT(OLD_ONE) -> vanish(OLD_ONE)
		:: else
		fi;
		!folder[OLD_ONE].there || !MY.there || INERT(me);
		d_step {
			give_up(me);
			MY.there = true;
			MY.claimed = (memory[me] != GONE -> 1 + s : 0)
		};
		next_wanted()
	};
	do
	:: atomic { want[k] ->
		if
		:: THERE(me) -> MY.part[k] = want[k]
		:: !THERE(me) || MY.whole == FENCE -> goto make_folder /* it was removed, or is being emptied */
		fi;
		k++;
		next_wanted();
		if
		:: k == PARTS -> k = 0; break
		:: else
		fi }
	od;
commit:
	atomic {
		if
		:: memory[me] != CURRENT || !THERE(me) /* ENOENT */
		:: else ->
			if
			:: MY.whole == FENCE -> goto make_folder /* EISDIR: it was dropped */
			:: else ->
				/* Promise: a folder is committed once, with a claim of its own holder. */
				assert(MY.whole == NOTHING && place[s] == me + 1 && mask[s] == m);
				d_step {
					MY.whole = MESSAGE;
					committed = true;
					acknowledged = acknowledged | BY_WHOLE;
					leave(s);
					promises()
				};
				if
				:: goto finish
				:: skip /* it was done, but the answer is ENOENT */
				fi
			fi
		fi
	};
	atomic { /* ENOENT: look for its own `whole` */
		if
		:: THERE(me) && MY.whole == MESSAGE -> goto finish
		:: else
		fi
	};
	atomic { /* look for the claim under another deadline */
		if
		:: memory[me] != GONE -> memory[me] = CURRENT; goto commit
		:: else
		fi
	};
	/* The folder had parts. If it has neither parts nor a fence now, it was committed and rolled forward. */
	found = (THERE(me) && ANY_PART(me));
	atomic {
		found = (found || THERE(me) && MY.whole == FENCE);
		if
		:: !found -> goto done
		:: else
		fi;
		/* The lease is lost; its folder is left to sweeps. */
		/* Promise: who is told that the lease is lost has not committed. */
		assert(!committed);
		goto died
	};
finish:
#ifdef FROM_MEMORY
	known = THOSE(want);
#endif
	roll_forward(me, true);
done:
	atomic {
		/* Promise: who is told "done" has committed, and what it settled is where it goes. */
		assert(committed && (failed & want[ERROR]) == want[ERROR]);
		assert((acknowledged & (want[PROCESSED] | BY_WHOLE)) == (want[PROCESSED] | BY_WHOLE));
		goto died
	};
died:
	atomic {
		memory[me] = FORGOTTEN;
		s = 0;
		m = 0;
		want[ERROR] = 0;
		want[PROCESSED] = 0;
		want[LEFT] = 0;
		want[LATER] = 0;
		k = 0;
		found = false;
		committed = false;
#ifdef FROM_MEMORY
		known = 0;
#endif
#ifdef SYNC_OWN
		own = 0;
#endif
		goto claim
	}
}

/* A claim that is in processing/. */
#define CLAIM(s) (mask[s] && place[s] != TARGET)

/* The claim that a folder is named after is in processing/, as far as a sweep can see. */
#if defined(PROCESSING_FIRST)
#define HELD(f) (folder[f].claimed && saw[me] & folder[f].claimed)
#elif defined(FROM_MEMORY)
#define HELD(f) false
#elif defined(TORN_LISTING)
/* Broken on purpose: it lists processing/ once. A claim that is extended meanwhile may show neither of its names. */
#define HELD(f) (folder[f].claimed && memory[place[folder[f].claimed - 1] - 1] == CURRENT)
#else
#define HELD(f) folder[f].claimed
#endif

/* Takes one folder after the other: rolls forward what is committed, drops what has lost its claim. */
proctype sweep(byte me)
{
	byte k;
#ifdef FROM_MEMORY
	byte known;
#endif
#ifdef SYNC_OWN
	byte own;
#endif

	/* It lists staged/, then processing/, and leaves a folder alone whose claim is there; it looks into the others. A claim
	   that is gone never comes back, so that this is one step: the last. */
end:	do
	::
#ifdef PROCESSING_FIRST
		/* Broken on purpose: it lists processing/ before staged/. */
		saw[me] = CLAIM(0) | CLAIM(1) << 1;
end_of_list:
#endif
		atomic {
			if
			:: folder[0].there && !HELD(0) -> at[me] = 0
			:: folder[1].there && !HELD(1) -> at[me] = 1
			:: folder[2].there && !HELD(2) -> at[me] = 2
			fi;
#ifdef FROM_MEMORY
			/* Broken on purpose: it lists staged/ and all in it, then processing/, and does not list the parts again. */
			known = THOSE(folder[at[me]].part)
		};
		atomic {
			if
			:: folder[at[me]].claimed -> goto next
			:: else
			fi;
#endif
#ifndef RENAME_AWAY
			if
			:: folder[at[me]].whole == MESSAGE -> goto committed_folder
			:: folder[at[me]].whole == FENCE && ANY_PART(at[me]) -> goto dropped_folder
			:: folder[at[me]].whole == FENCE && !ANY_PART(at[me]) -> goto next
			:: folder[at[me]].whole == NOTHING && ANY_PART(at[me])
			:: folder[at[me]].whole == NOTHING && !ANY_PART(at[me]) -> goto next /* see `others` */
			fi
#endif
		};
#ifdef RENAME_AWAY
		/* Broken on purpose: it renames the folder away and looks then; it puts it back, or removes it. */
		folder[at[me]].away = folder[at[me]].there;
		if
		:: folder[at[me]].whole == MESSAGE -> folder[at[me]].away = false; roll_forward(at[me], false)
		:: else ->
			atomic {
				if
				:: folder[at[me]].away -> d_step { vanish(at[me]); promises() }
				:: else
				fi }
		fi;
#else
		atomic { /* mkdir whole: whichever is first decides, this or the commit */
			if
			:: !THERE(at[me]) -> goto next
			:: else ->
				if
				:: folder[at[me]].whole == MESSAGE -> goto committed_folder
				:: folder[at[me]].whole == FENCE -> goto dropped_folder
				:: else ->
					folder[at[me]].whole = FENCE;
					goto dropped_folder
				fi
			fi };
committed_folder:
		roll_forward(at[me], false);
		goto next;
dropped_folder:
		do
		:: list(at[me]); d_step { folder[at[me]].part[k] = 0; k = 0; promises() }
		od;
#endif
died:
next:
		atomic {
			at[me] = NONE;
			k = 0;
#ifdef FROM_MEMORY
			known = 0;
#endif
#ifdef SYNC_OWN
			own = 0;
#endif
		}
	od
}

/* At any step: give a claim back to target/, extend it, ack it as a whole, or remove an empty folder. */
proctype others()
{
	byte s;

end:	do
	:: atomic {
		if
		:: CLAIM(0) -> s = 0
		:: CLAIM(1) -> s = 1
		fi;
		if
		:: d_step { lose_claim(s); promises() }
		:: memory[place[s] - 1] == CURRENT -> memory[place[s] - 1] = EXTENDED
		:: d_step { acknowledged = acknowledged | mask[s]; leave(s); promises() }
		fi;
		s = 0 }
	:: d_step { THERE(0) && !ANY_PART(0) && folder[0].whole == NOTHING -> vanish(0) }
	:: d_step { THERE(1) && !ANY_PART(1) && folder[1].whole == NOTHING -> vanish(1) }
	:: d_step { THERE(2) && !ANY_PART(2) && folder[2].whole == NOTHING -> vanish(2) }
	od
}

init
{
	atomic {
		mask[0] = ALL;
		if
		:: first_plan = NONE_LEFT
#ifdef TWO_SWEEPS
		:: first_plan = ONE_FAILED
#else
		:: first_plan = SOME_OF_EACH
		:: first_plan = CHECKPOINT; second_plan = ONE_FAILED
		:: first_plan = CUT; second_plan = NONE_LEFT
#endif
		fi;
		at[0] = NONE;
#ifdef TWO_SWEEPS
		at[1] = NONE;
		run sweep(1);
#endif
		run sweep(0);
		run holder(0);
		run holder(1);
		run others()
	}
}
