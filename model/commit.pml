/* Many files, one commit: a message becomes a copy for each of two receivers, all or none.

   What goes out with an ack is committed in the same way: there a part is a message that the holder made, and a receiver
   is its queue. A draft counts as a part, so `stage` begins with the draft.

   Two holders claim the message, each time under a new name, and stage the copies as parts in a folder that is new for
   each attempt. The commit renames the claim to `whole` in that folder. From then on anybody moves the parts to their
   receivers, and archives `whole` last. Two sweeps drop a folder whose claim is gone: `mkdir whole` in it is the fence.
   Somebody takes the living for dead and gives claims back at any step, or extends them.

   Each step is one call of the file system. Anybody may die at any step: to be dead is to make no further step. What a
   last sweep would leave if all were dead is judged after every change.

   A receiver takes away what arrives at any moment, so that nobody can ask what it holds: it is a count of what arrived.
   The rename of the commit may be answered by ENOENT although it was done, as on NFS after a lost answer.

   One thing bounds the search: beside the folders of the holders' attempts there is one that was given up. A holder that
   would give up another waits until the first is removed, or until it holds nothing but its fence and no sweep is about
   it; then it is forgotten. */

#define OLD_ONE   2                     /* the folder of an attempt that was given up, after one for each holder */
#define NONE      3                     /* a folder that is not there */

#define TARGET    0                     /* where the message is: in target/, */
#define CLAIMED   1                     /* in processing/, */
#define STAGED    2                     /* `whole` in a folder, */
#define PROCESSED 3                     /* or in processed/ */

#define NOTHING   0                     /* what is called `whole` in a folder: nothing, */
#define MESSAGE   1                     /* the message, */
#define FENCE     2                     /* or a folder */

#define FORGOTTEN 0                     /* what a holder remembers of its claim: nothing, */
#define CURRENT   1                     /* its name, */
#define EXTENDED  2                     /* the name that it had before somebody extended it, */
#define GONE      3                     /* or one that no file will have again */

typedef Folder {
	bool there;
	bool claimed;                   /* the claim that it is named after is in processing/ */
	bool part[2];
	byte whole;
	bool away                       /* it has another name, with RENAME_AWAY */
};

Folder folder[4];                       /* the first two are those of the holders' attempts, the last is never there */
byte place;
byte claimer;                           /* 1 + the holder whose claim is in processing/ */
byte memory[2];
byte at[2];                             /* the folder that a sweep is about */
byte saw[2];                            /* the claim that a sweep saw, with PROCESSING_FIRST */

byte arrived[2];                        /* how many copies each receiver was given */
byte committed;                         /* 1 + the holder whose commit was made */

#define THERE(f) (folder[f].there && !folder[f].away)
#define PARTS(f) (folder[f].part[0] || folder[f].part[1])

/* -- the promises ------------------------------------------------------------------------------------------------- */

#define COMMITTED(f)  (folder[f].whole == MESSAGE)

/* What a receiver has got after a last sweep, which moves the parts of what is committed and drops the rest. */
#define IN(f, i)      (COMMITTED(f) && folder[f].part[i])
#define IN_THE_END(i) (arrived[i] + IN(0, i) + IN(1, i) + IN(2, i))

/* What is true after every change: all may be dead from here on, and a last sweep comes. */
inline promises()
{
	/* Promise: no receiver gets the message twice, and none while it is in target/ or processing/. */
	assert(arrived[0] <= (place >= STAGED) && arrived[1] <= (place >= STAGED));
	/* Promise: the message is archived after all its parts were moved. */
	assert(place != PROCESSED || arrived[0] && arrived[1]);
	/* Promise: in the end the message is archived, and each receiver has got it; or it waits in target/, and none has. */
	assert(IN_THE_END(0) == (place >= STAGED) && IN_THE_END(1) == (place >= STAGED));
	/* Promise: the message is in one place, and nothing stays staged but fences. */
	assert(COMMITTED(0) + COMMITTED(1) + COMMITTED(2) == (place == STAGED))
}

/* -- names -------------------------------------------------------------------------------------------------------- */

#define ABOUT(f) (at[0] == f || at[1] == f)

/* Remove a folder. Its name never comes again: a sweep that is about it will find nothing. */
inline vanish(f)
{
	folder[f].there = false;
	folder[f].claimed = false;
	folder[f].part[0] = false;
	folder[f].part[1] = false;
	folder[f].whole = NOTHING;
	folder[f].away = false;
	at[0] = (at[0] == f -> NONE : at[0]);
	at[1] = (at[1] == f -> NONE : at[1])
}

/* It holds nothing but its fence, and no sweep is about it: who comes upon it leaves it alone. */
#define INERT(f) (folder[f].whole == FENCE && !PARTS(f) && !ABOUT(f))

/* The holder is about another folder from here on. */
inline give_up(f)
{
	if
	:: folder[f].there && INERT(f) -> vanish(f)
	:: else
	fi;
	if
	:: folder[f].there ->
		folder[OLD_ONE].there = true;
		folder[OLD_ONE].claimed = folder[f].claimed;
		folder[OLD_ONE].part[0] = folder[f].part[0];
		folder[OLD_ONE].part[1] = folder[f].part[1];
		folder[OLD_ONE].whole = folder[f].whole;
		folder[OLD_ONE].away = folder[f].away;
		at[0] = (at[0] == f -> OLD_ONE : at[0]);
		at[1] = (at[1] == f -> OLD_ONE : at[1]);
		vanish(f)
	:: else
	fi
}

/* The claim leaves processing/: it has a name that no file will have again. */
inline lose_claim()
{
	memory[claimer - 1] = (memory[claimer - 1] == FORGOTTEN -> FORGOTTEN : GONE);
	folder[0].claimed = (claimer == 1 -> false : folder[0].claimed);
	folder[1].claimed = (claimer == 2 -> false : folder[1].claimed);
	folder[OLD_ONE].claimed = false;
#ifdef PROCESSING_FIRST
	saw[0] = (saw[0] == claimer -> GONE : saw[0]);
	saw[1] = (saw[1] == claimer -> GONE : saw[1]);
#endif
	claimer = 0
}

/* -- what is done to a folder ------------------------------------------------------------------------------------- */

/* Rename a part to its receiver: one that is gone was moved by another. */
inline move(f, i)
{
	d_step {
		if
		:: THERE(f) && folder[f].part[i] ->
			folder[f].part[i] = false;
			arrived[i]++;
			promises()
		:: else
		fi
	}
}

/* Rename `whole` to processed/: if it is gone, another archived it. */
inline archive(f)
{
	d_step {
		if
		:: THERE(f) && folder[f].whole == MESSAGE ->
			folder[f].whole = NOTHING;
			place = PROCESSED;
			promises()
		:: else ->
			/* Promise: nothing is archived but the message. */
			assert(!THERE(f) || folder[f].whole != FENCE)
		fi
	}
}

/* Move the parts of a committed folder, and archive `whole`; any number may do this at once. */
inline roll_forward(f)
{
#ifdef WHOLE_FIRST
	/* Broken on purpose: the message is archived before its parts are moved. */
	archive(f);
#endif
	do
	:: true ->
		move(f, 0);
		move(f, 1);
		if
		:: THERE(f) && PARTS(f)
		:: else -> break
		fi
	od;
	archive(f)
}

inline unlink(f, i)
{
	d_step {
		if
		:: THERE(f) -> folder[f].part[i] = false; promises()
		:: else
		fi
	}
}

/* -- who takes part ----------------------------------------------------------------------------------------------- */

#define MY folder[me]
#define MY_CLAIM (place == CLAIMED && claimer == me + 1)

inline stage(i)
{
	atomic {
		if
		:: THERE(me) -> MY.part[i] = true
		:: !THERE(me) || MY.whole == FENCE -> goto make_folder /* it was removed, or is being emptied */
		fi
	}
}

proctype holder(byte me)
{
	bool found;

end:
claim:
	atomic {
		place == TARGET;
		place = CLAIMED;
		claimer = me + 1;
		memory[me] = CURRENT;
		promises()
	};
make_folder:
	atomic {
		if
		:: folder[OLD_ONE].there && INERT(OLD_ONE) -> vanish(OLD_ONE)
		:: else
		fi;
		!folder[OLD_ONE].there || !MY.there || INERT(me);
		give_up(me);
		MY.there = true;
		MY.claimed = (memory[me] != GONE)
	};
	stage(0);
	stage(1);
#ifdef SENT_FIRST
	/* Broken on purpose: a part is moved before the commit. */
	move(me, 0);
#endif
commit:
	atomic {
		if
		:: !MY_CLAIM || memory[me] != CURRENT || !THERE(me) /* ENOENT */
		:: else ->
			if
			:: MY.whole == FENCE -> goto make_folder /* EISDIR: it was dropped */
			:: else ->
				/* Promise: it is committed once. */
				assert(MY.whole == NOTHING && !committed);
				MY.whole = MESSAGE;
				place = STAGED;
				committed = me + 1;
				lose_claim();
				promises();
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
		:: MY_CLAIM && memory[me] != GONE -> memory[me] = CURRENT; goto commit
		:: else
		fi
	};
	/* The folder had parts. If it has neither parts nor a fence now, it was committed and rolled forward. */
#ifdef FENCE_LOOKED_FIRST
	/* Broken on purpose: it is fenced and emptied between the two. */
	found = (THERE(me) && MY.whole == FENCE);
	found = (found || THERE(me) && PARTS(me));
#else
	found = (THERE(me) && PARTS(me));
	found = (found || THERE(me) && MY.whole == FENCE);
#endif
	atomic {
		if
		:: !found -> goto done
		:: else
		fi;
#ifdef LOST_SENDS
		/* Broken on purpose: who lost the claim goes on as if it had committed. */
		goto finish;
#endif
		/* The lease is lost; its folder is left to sweeps. */
		/* Promise: who is told that the lease is lost has not committed. */
		assert(committed != me + 1);
		found = false;
		memory[me] = FORGOTTEN;
		goto claim
	};
finish:
	roll_forward(me);
done:
	/* Promise: who is told "done" has committed, and every receiver has its copy. */
	atomic { assert(committed == me + 1 && arrived[0] && arrived[1]); memory[me] = FORGOTTEN }
}

/* Takes one folder after the other: rolls forward what is committed, drops what has lost its claim. */
proctype sweep(byte me)
{
end:	do
	::
#ifdef PROCESSING_FIRST
		/* Broken on purpose: it lists processing/ before staged/. */
		saw[me] = (place == CLAIMED -> claimer : 0);
#endif
end_of_list:	atomic { /* list staged/ */
			if
			:: folder[0].there -> at[me] = 0
			:: folder[1].there -> at[me] = 1
			:: folder[2].there -> at[me] = 2
			fi;
#ifdef PROCESSING_FIRST
			if
			:: folder[at[me]].claimed && saw[me] == claimer -> saw[me] = 0; goto next
			:: else -> saw[me] = 0
			fi
#endif
		};
#if !defined(PROCESSING_FIRST) && !defined(DROP_HELD)
		/* List processing/, and leave a folder alone whose claim is there: a claim that is gone never comes back. With
		   DROP_HELD it is broken on purpose: it drops a folder that may be committed since it was looked into. */
		if
		:: folder[at[me]].claimed -> goto next
		:: else
		fi;
#endif
#ifndef RENAME_AWAY
		atomic { /* look into the folder, not before */
			if
			:: folder[at[me]].whole == MESSAGE -> goto committed_folder
			:: folder[at[me]].whole == FENCE && PARTS(at[me]) -> goto dropped_folder
			:: folder[at[me]].whole == FENCE && !PARTS(at[me]) -> goto next
			:: folder[at[me]].whole == NOTHING && PARTS(at[me])
			:: folder[at[me]].whole == NOTHING && !PARTS(at[me]) -> goto next /* see `others` */
			fi
		};
#endif
#ifdef RENAME_AWAY
		/* Broken on purpose: it renames the folder away and looks then; it puts it back, or removes it. */
		folder[at[me]].away = folder[at[me]].there;
		if
		:: folder[at[me]].whole == MESSAGE -> folder[at[me]].away = false; roll_forward(at[me])
		:: else ->
			atomic {
				if
				:: folder[at[me]].away -> vanish(at[me]); promises()
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
		roll_forward(at[me]);
		goto next;
dropped_folder:
		unlink(at[me], 0);
		unlink(at[me], 1);
#endif
next:
		at[me] = NONE
	od
}

/* At any step: give the claim back to target/, extend it, or remove a folder that is empty. */
proctype others()
{
end:	do
	:: d_step { place == CLAIMED -> place = TARGET; lose_claim(); promises() }
	:: d_step { place == CLAIMED && memory[claimer - 1] == CURRENT -> memory[claimer - 1] = EXTENDED }
	:: d_step { THERE(0) && !PARTS(0) && folder[0].whole == NOTHING -> vanish(0) }
	:: d_step { THERE(1) && !PARTS(1) && folder[1].whole == NOTHING -> vanish(1) }
	:: d_step { THERE(2) && !PARTS(2) && folder[2].whole == NOTHING -> vanish(2) }
	od
}

init
{
	atomic {
		at[0] = NONE;
		at[1] = NONE;
		run holder(0);
		run holder(1);
		run sweep(0);
		run sweep(1);
		run others()
	}
}
