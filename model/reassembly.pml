/* Parts of a bundle become one message again (docs/protocol.md, "The life of a message"; dropq/upkeep/reassembly.py).

   Two joiners want the same two parts, which lie in error/. Each makes a folder and a draft in it, takes the parts
   into the folder, writes the draft, and renames it into target/. That rename is the commit: parts in a folder that has
   no draft after they were listed are in the whole, and are removed. Who gives up first renames the draft, so that nobody can
   commit, and then the folder: parts in a folder of that name go back, whatever else is in it.
   Beside them is a sweep that takes the living for dead at any time, and somebody who requeues parts by hand, and
   rejects them again; with TWO_SWEEPS there are two sweeps and one joiner. A joiner's calls reach its folder whatever
   it is called, as on NFS for a while. Anybody may die at any step: to be dead is to make no further step. At any moment
   a last sweep finds all others dead, and what it leaves behind is judged. Each step is one call of the file system. */

#define JOINERS   2
#define PARTIES   5                     /* two joiners, two sweeps, the last sweep */
#define LAST      4

#define NOWHERE   0                     /* what a folder is called: nothing, it is removed, or not made yet; */
#define PLAIN     1                     /* the name that it appears by; */
#define BACK      2                     /* the name of a folder whose parts go back; */
#define GONE      3                     /* a name that no folder will have again */

#define NONE      0                     /* what a folder has beside parts: nothing; */
#define DRAFT     1                     /* the draft; */
#define DROPPED   2                     /* what was the draft of parts that go back */

#define ERROR     0                     /* where a part is: in its state; */
#define TARGET    1                     /* requeued by hand; */
#define IN(f)     (f + 2)               /* in the folder of a joiner; */
#define REMOVED   4

typedef Dir {
	byte name;
	byte mark
};

Dir dir[JOINERS];                       /* the folder that a joiner makes */
byte at[PARTIES];                       /* the path of the folder that somebody is about */
byte about[PARTIES];                    /* which folder that is */
byte part[2];
bool whole[JOINERS];                    /* the whole that a joiner made is in target/ */
bool closed;                            /* all are dead; the last sweep is through */

#define HERE      (dir[f].name == at[me])
#define SEEN(i)   ((part[i] == ERROR || part[i] == TARGET) + whole[0] + whole[1])
#define GOES_BACK(f) (dir[f].mark || dir[f].name == BACK)
#define SAFE(i)   ((part[i] == IN(0) && GOES_BACK(0)) || (part[i] == IN(1) && GOES_BACK(1)))

/* Promise: each record can be taken from one place, or is in a part that goes back until the whole has it. */
#define promises() assert(SEEN(0) + SAFE(0) == 1 && SEEN(1) + SAFE(1) == 1)

/* A folder loses its name: who remembers it will find nothing. */
inline forget_name()
{
	if :: about[0] == f && at[0] == dir[f].name -> at[0] = GONE :: else fi;
	if :: about[1] == f && at[1] == dir[f].name -> at[1] = GONE :: else fi;
	if :: about[2] == f && at[2] == dir[f].name -> at[2] = GONE :: else fi;
	if :: about[3] == f && at[3] == dir[f].name -> at[3] = GONE :: else fi
}

/* Move a part back, or remove it; one that is not there was moved by another, or is where the folder is by now. */
inline end_part(i)
{
	d_step {
		if
		:: part[i] == IN(f) && HERE -> part[i] = (is_sent -> REMOVED : ERROR); promises()
		:: else
		fi
	}
}

inline list()
{
	d_step {
		has[0] = (part[0] == IN(f) && HERE);
		has[1] = (part[1] == IN(f) && HERE)
	}
}

inline look()
{
	d_step { mark = (HERE -> dir[f].mark : NONE) }
}

/* Rename the draft, so that nobody commits. */
inline fence()
{
	d_step { if :: HERE && dir[f].mark == DRAFT -> dir[f].mark = DROPPED :: else fi }
}

/* Rename the folder, so that its name says what becomes of its parts. */
inline rename_back()
{
	d_step {
		if
		:: HERE -> forget_name(); dir[f].name = BACK; at[me] = BACK
		:: else -> at[me] = GONE
		fi
	}
}

/* Bring the parts of a folder where they belong, and remove it; any number may do this at once. */
inline settle()
{
	if
	:: at[me] == BACK -> list()
	:: else ->
#ifdef LOOK_FIRST
		/* Broken on purpose: it looks for the draft first and renames it then, and the joiner commits in between. */
		list();
		look();
		if
		:: mark == DRAFT -> fence(); mark = DROPPED
		:: else -> skip
		fi;
#else
#ifdef PARTS_LAST
		/* Broken on purpose: it looks for the draft before it lists the parts, and both come in between. */
		fence();
		look();
		list();
#else
		list();
		fence();
		look();
#endif
#endif
		if
#ifdef BY_MARK
		/* Broken on purpose: the mark alone says that the parts go back, and a slow joiner takes one when it is gone. */
		:: mark == DROPPED -> back = true; list()
#else
		:: mark == DROPPED -> rename_back(); list()
#endif
		:: mark == DRAFT -> at[me] = GONE /* its joiner lives, and begins */
		:: else -> skip
		fi
	fi;
	is_sent = (at[me] == PLAIN && !back);
	if :: has[0] -> end_part(0) :: else fi;
	if :: has[1] -> end_part(1) :: else fi;
	d_step { /* remove what was the draft, once the name says what becomes of parts */
		if
#ifndef MARKS_TOO
		:: HERE && (at[me] == BACK || back) && part[0] != IN(f) && part[1] != IN(f) -> dir[f].mark = NONE
#else
		/* Broken on purpose: who found no draft removes what came since then, and parts come after it. */
		:: HERE && part[0] != IN(f) && part[1] != IN(f) -> dir[f].mark = NONE
#endif
		:: else
		fi;
		promises()
	};
	d_step { /* remove the folder, if it is empty */
		if
		:: HERE && !dir[f].mark && part[0] != IN(f) && part[1] != IN(f) -> forget_name(); dir[f].name = NOWHERE
		:: else
		fi;
		at[me] = GONE;
		is_sent = false;
		back = false;
		has[0] = false;
		has[1] = false;
		mark = NONE
	}
}

/* Take a part out of error/; a joiner that does not find it gives up. */
inline take(i)
{
	atomic {
#ifdef PARTS_STAY
		/* Broken on purpose: the parts stay where anybody may requeue them, and are removed after the commit. */
		if :: part[i] != ERROR -> goto settled :: else fi
#else
		if
		:: part[i] == ERROR && dir[f].name -> part[i] = IN(f); promises()
		:: else -> goto settled
		fi
#endif
	}
}

proctype joiner(byte me) provided (!closed)
{
	byte f = me, mark;
	bool has[2], is_sent, back;

end:	do
	:: atomic { dir[f].name == NOWHERE && !whole[me] -> dir[f].name = PLAIN; at[me] = PLAIN };
#ifdef DRAFT_LATE
		/* Broken on purpose: a part comes before the draft, and whoever finds it takes it for sent. */
		take(0);
#endif
		atomic { if :: dir[f].name -> dir[f].mark = DRAFT :: else -> goto settled fi };
#ifndef DRAFT_LATE
		take(0);
#endif
		take(1);
		atomic { /* commit */
			if
			:: dir[f].name && dir[f].mark == DRAFT ->
				dir[f].mark = NONE;
				whole[me] = true;
#ifdef PARTS_STAY
				if :: part[0] == ERROR -> part[0] = REMOVED :: else fi;
				if :: part[1] == ERROR -> part[1] = REMOVED :: else fi;
#endif
				promises()
			:: else
			fi
		};
settled:
		settle()
	od
}

/* Takes one folder after the other, and brings it in order. */
proctype sweep(byte me) provided (!closed)
{
	byte f, mark;
	bool has[2], is_sent, back;

end:	do
	:: atomic {
		if
		:: dir[0].name -> f = 0
		:: dir[1].name -> f = 1
		fi;
		at[me] = dir[f].name;
		about[me] = f };
		settle();
		d_step { f = 0; at[me] = NOWHERE; about[me] = 0 }
	od
}

/* Requeues parts by mv, and rejects them again. */
proctype hand() provided (!closed)
{
end:	do
	:: d_step { part[0] == ERROR -> part[0] = TARGET }
	:: d_step { part[1] == ERROR -> part[1] = TARGET }
	:: d_step { part[0] == TARGET -> part[0] = ERROR }
	:: d_step { part[1] == TARGET -> part[1] = ERROR }
	od
}

/* All others are dead: sweep once more, and see. */
proctype last_sweep(byte me)
{
	byte f, mark;
	bool has[2], is_sent, back;

	atomic {
		closed = true;
		do
		:: f < JOINERS ->
			if
			:: dir[f].name -> at[me] = dir[f].name; settle()
			:: else
			fi;
			f++
		:: else -> break
		od;
		/* Promise: both records are in one whole, or in their parts, where anybody sees them; no folder is left. */
		assert(SEEN(0) == 1 && SEEN(1) == 1);
		assert(dir[0].name == NOWHERE && dir[1].name == NOWHERE)
	};
end:	do
	:: closed /* nothing more happens */
	od
}

init
{
	atomic {
		about[1] = 1;
		run joiner(0);
		run sweep(2);
#ifdef TWO_SWEEPS
		run sweep(3);
#else
		run joiner(1);
#endif
		run hand();
		run last_sweep(LAST)
	}
}
