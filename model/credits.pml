/* The credits of selectors: no more messages are out than were granted, and each credit comes back.

   Three queues in a chain: a MOVE selector moves messages from the first to the second, another from the second to the
   third. A spent credit is a file in the queue that the message came from. Its name, the key, stands in the message's name.
   Two routers work both selectors. A worker settles messages in all three queues. A sweep looks for credits that are left
   over. An administrator removes selectors and puts new ones in their place. Somebody renames messages by hand, back to
   the first queue or out of the graph, and sends again what was settled.

   Each step is one call of the file system; the selector's file and the messages are looked at as the lock is taken, since
   what matters of them changes under that lock alone, or is found out by the rename. Nothing is bounded: there is any
   number of moves, looks, removals and deaths. Whoever dies after a step forgets all, its lock is free, and another takes
   its place. So what the disk may hold at any step, it may also hold while all are dead: then a last sweep may come, and
   what it leaves is judged.

   The key of a credit that was unlinked serves again: every name and every memory that had it is made to hold none, since
   nobody can tell a key whose file is gone from no key. */

#define MESSAGES  2
#ifdef TWO_EACH
#define CREDIT    2                     /* of each selector; there is one message then, and one router */
#define SENT      1
#else
#define CREDIT    1
#define SENT      2
#endif

#define FIRST     0
#define SECOND    1
#define THIRD     2
#define ELSEWHERE 3                     /* settled, or taken out of the graph by hand */

#define KEY(q, i) (1 + (q) * SLOTS + (i)) /* one of queue `q`; 0 stands for no key */
#define KEYS      (2 * SLOTS)
#define BIT(k)    ((1 << (k)) >> 1)     /* sets of keys: one bit for each */
#define OF(q)     (((1 << SLOTS) - 1) << ((q) * SLOTS))
#ifdef KEY_OF_ID
#define SLOTS     MESSAGES
#else
#define SLOTS     CREDIT
#endif

typedef Folder { byte name[MESSAGES] }; /* by message: 1 + the key in its name, 0 where it does not lie here */

Folder queue[4];
byte credits;                           /* the files that are there */
byte below[KEYS + 1];                   /* what a credit names: the one under which its message had come */
bool removed[2];                        /* a selector's file is called .NAME.removed; nothing is moved by it */
bool locked[2];                         /* a queue's policy lock */

/* What is remembered. */
#define WORKER        0
#define ADMINISTRATOR 1
#define SWEEP         0
#define LAST_SWEEP    1
byte had[2];                            /* by a router: the key that it saw in the message's name, */
byte made[2];                           /* and the key of the credit that it made */
byte owed[2];                           /* by who took a message away: the credits that it is about to unlink */
byte found[2];                          /* by a look: the credits that something names, */
byte left[2];                           /* those that it is about to read or to unlink, */
byte doubted[2];                        /* and those that were not live in the look before */

bool closed;                            /* all are dead; the last sweep is through */

byte i, j;                              /* scratch: 0 between two steps */

/* -- the promises ------------------------------------------------------------------------------------------------- */

#define IN(q, m)  (queue[q].name[m] > 0)
#define VIA(q, m) (queue[q].name[m] - 1)
#define THERE(k)  (credits & BIT(k))

#define PLACES(m)  (IN(FIRST, m) + IN(SECOND, m) + IN(THIRD, m) + IN(ELSEWHERE, m))
#define COUNT(q)   COUNT_OF(credits & OF(q))
#define COUNT_OF(s) (((s) & 1) + ((s) >> 1 & 1) + ((s) >> 2 & 1) + ((s) >> 3 & 1))

/* A message that was moved is under a credit of each queue that it came through. */
#define COVERED(m) \
	((!IN(SECOND, m) || THERE(VIA(SECOND, m)) & OF(FIRST)) && \
	 (!IN(THIRD, m) || THERE(VIA(THIRD, m)) & OF(SECOND) && below[VIA(THIRD, m)] & credits & OF(FIRST)))

/* What is true after every change. */
inline promises()
{
	/* Promise: a message is in one place at any time, and never gone. */
	assert(PLACES(0) == 1 && PLACES(1) == SENT - 1);
	/* Promise: no more credits are out than were granted, */
	assert(COUNT(FIRST) <= CREDIT && COUNT(SECOND) <= CREDIT);
	/* and none is taken from a message that lies under it: so no more messages are out than credits. */
	assert(COVERED(0) && COVERED(1))
}

/* -- calls of the file system ------------------------------------------------------------------------------------- */

/* Rename a message to another queue, under a key or none. */
inline rename(from, m, to, k)
{
	d_step {
		queue[to].name[m] = 1 + k;
		queue[from].name[m] = 0;
		promises()
	}
}

/* Unlink a credit: its key is one that no file will have again. */
inline unlink(k)
{
	d_step {
		if
		:: THERE(k) ->
			credits = credits & ~BIT(k);
#ifndef KEY_OF_ID
			for (i : FIRST .. ELSEWHERE) {
				for (j : 0 .. MESSAGES - 1) {
					queue[i].name[j] = (queue[i].name[j] == 1 + k -> 1 : queue[i].name[j])
				}
			}
			for (i : 1 .. KEYS) {
				below[i] = below[i] & ~BIT(k)
			}
			for (i : 0 .. 1) {
				had[i] = (had[i] == k -> 0 : had[i]);
				made[i] = (made[i] == k -> 0 : made[i]);
				owed[i] = owed[i] & ~BIT(k);
				found[i] = found[i] & ~BIT(k);
				left[i] = left[i] & ~BIT(k);
				doubted[i] = doubted[i] & ~BIT(k)
			}
#endif
			below[k] = 0;
			i = 0;
			j = 0;
			promises()
		:: else
		fi
	}
}

/* Take one of a set of keys, the nearest to the end of the chain first. */
inline take(set)
{
	k = KEYS;
	do
	:: set & BIT(k) -> break
	:: else -> k--
	od;
	set = set & ~BIT(k)
}

/* -- who takes part ----------------------------------------------------------------------------------------------- */

#define ANY(q) (IN(q, 0) || IN(q, 1))

/* Choose one of the messages of a queue. */
inline choose(q)
{
	if
	:: IN(q, 0) -> m = 0
	:: IN(q, 1) -> m = 1
	fi
}

/* Moves one message after the other, in both queues. */
proctype router(byte me) provided (!closed)
{
	byte q, m, k;

end:	do
	::
		atomic { /* take the lock, look that the selector is there, list the messages */
			if
			:: !locked[FIRST] && !removed[FIRST] && ANY(FIRST) -> q = FIRST
			:: !locked[SECOND] && !removed[SECOND] && ANY(SECOND) -> q = SECOND
			fi;
			locked[q] = true;
			choose(q);
			had[me] = VIA(q, m)
		};
		atomic { /* count the credits, which nobody else makes now, and create one */
			if
			:: COUNT(q) >= CREDIT -> goto unlock
			:: else
			fi;
#ifdef KEY_OF_ID
			/* Broken on purpose: the message's id is the key. */
			k = KEY(q, m);
			if
			:: THERE(k) -> goto unlock
			:: else
			fi;
#else
			k = KEY(q, 0);
			do
			:: THERE(k) -> k++
			:: else -> break
			od;
#endif
			credits = credits | BIT(k);
#ifdef BELOW_ANYWHERE
			/* Broken on purpose: it names the credit in the message's name, and those below, wherever that one leads. */
			below[k] = BIT(had[me]) | below[had[me]];
#else
			/* It names the credit in the message's name only if that one leads here. */
			below[k] = (q == SECOND -> BIT(had[me]) & OF(FIRST) : 0);
#endif
			made[me] = k;
			d_step { promises() };
			if
			:: skip
			:: goto unlock /* die */
			fi
		};
		atomic {
			if
			:: queue[q].name[m] == 1 + had[me] -> rename(q, m, q + 1, made[me]); goto unlock
			:: else -> /* it was taken */
				if
				:: skip
				:: goto unlock /* die */
				fi
			fi
		};
		unlink(made[me]);
unlock:
		atomic { locked[q] = false; had[me] = 0; made[me] = 0; q = 0; m = 0; k = 0 }
	od
}

/* Unlink the credits of a message that was taken away. */
inline free(who)
{
	do
	:: atomic { owed[who] -> take(owed[who]); unlink(k); k = 0 }
	:: atomic { owed[who] -> owed[who] = 0 } /* die */
	:: atomic { !owed[who] -> break }
	od
}

/* Settles one message after the other, in all three queues. */
proctype worker() provided (!closed)
{
	byte q, m, k;

end:	do
	::
		atomic { /* ack */
			if
			:: ANY(FIRST) -> q = FIRST
			:: ANY(SECOND) -> q = SECOND
			:: ANY(THIRD) -> q = THIRD
			fi;
			choose(q);
			owed[WORKER] = BIT(VIA(q, m));
			rename(q, m, ELSEWHERE, 0);
			q = 0;
			m = 0
		};
		atomic { /* read its credit, if it is there: what lies below */
			if
			:: owed[WORKER] ->
				take(owed[WORKER]);
				owed[WORKER] = BIT(k) | below[k];
				k = 0
			:: else
			fi
		};
		free(WORKER)
	od
}

inline list_messages(who, q)
{
	d_step {
		found[who] = found[who] | (IN(q, 0) -> BIT(VIA(q, 0)) : 0) | (IN(q, 1) -> BIT(VIA(q, 1)) : 0)
	}
}

/* Look at the credits of a queue, whose lock is held; remove those that were not live in the look before either. */
inline look(who, q)
{
#ifndef CREDITS_FIRST
	list_messages(who, q + 1);
#endif
	/* List the credits of the queue that they lead to, and read one after the other: the third queue has none. With
	   CREDITS_FIRST it is broken on purpose: it lists them first, and the messages once. */
	left[who] = (q == FIRST -> credits & OF(SECOND) : 0);
	do
	:: atomic { left[who] -> take(left[who]); found[who] = found[who] | below[k]; k = 0 }
	:: atomic { !left[who] -> break }
	od;
	atomic { /* list the messages again */
		list_messages(who, q + 1);
		left[who] = credits & OF(q) & ~found[who] & doubted[who];
		doubted[who] = doubted[who] & ~OF(q) | credits & OF(q) & ~found[who] & ~doubted[who];
		found[who] = 0
	};
	do
	:: atomic { left[who] -> take(left[who]); unlink(k); k = 0 }
	:: atomic { left[who] && who == SWEEP -> left[who] = 0 } /* die */
	:: atomic { !left[who] -> break }
	od
}

#ifdef NO_LOCK
/* Broken on purpose: a look takes no lock. */
#define FREE(q) true
#else
#define FREE(q) !locked[q]
#endif

/* Looks at the credits of the one queue or the other. */
proctype sweep() provided (!closed)
{
	byte q, k;

end:	do
	::
		atomic {
			if
			:: FREE(FIRST) && credits & OF(FIRST) -> q = FIRST
			:: FREE(SECOND) && credits & OF(SECOND) -> q = SECOND
			fi;
#ifndef NO_LOCK
			locked[q] = true
#endif
		};
		look(SWEEP, q);
		atomic {
#ifndef NO_LOCK
			locked[q] = false;
#endif
			q = 0
		}
	:: atomic { doubted[SWEEP] -> doubted[SWEEP] = 0 } /* die, between two looks */
	od
}

/* The message lies where a credit of queue `q` leads, or further on, under a credit that names one of the first queue. */
#define UNDER(q, m)    (IN((q) + 1, m) && BIT(VIA((q) + 1, m)) & OF(q))
#define FURTHER(q, m)  ((q) == FIRST && IN(THIRD, m) && below[VIA(THIRD, m)] & OF(FIRST))
#define ANY_UNDER(q)   (UNDER(q, 0) || UNDER(q, 1) || FURTHER(q, 0) || FURTHER(q, 1))

/* Rename a message that lies under a credit of queue `q` back there, under the credit below that one if there is one. */
inline bring_back(q)
{
	if
	:: UNDER(q, 0) -> m = 0; from = q + 1
	:: UNDER(q, 1) -> m = 1; from = q + 1
	:: FURTHER(q, 0) -> m = 0; from = THIRD
	:: FURTHER(q, 1) -> m = 1; from = THIRD
	fi;
	k = VIA(from, m);
	owed[ADMINISTRATOR] = BIT(k) | (q == FIRST -> below[k] : 0);
	lower = (q == FIRST -> 0 : below[k]);
	k = 0;
	do
	:: BIT(k) == lower -> break
	:: else -> k++
	od;
	rename(from, m, q, k);
	lower = 0;
	from = 0;
	m = 0;
	k = 0
}

/* Removes a selector at any step, brings back what lies under its credits until none is there, and makes a new one. What
   was left over is removed by looks. */
proctype administrator() provided (!closed)
{
	byte m, from, lower, k;

end:	do
	:: atomic { !removed[FIRST] && !locked[FIRST] -> removed[FIRST] = true }
	:: atomic { !removed[SECOND] && !locked[SECOND] -> removed[SECOND] = true }
	:: atomic { removed[FIRST] && !(credits & OF(FIRST)) -> removed[FIRST] = false }
	:: atomic { removed[SECOND] && !(credits & OF(SECOND)) -> removed[SECOND] = false }
	:: atomic { removed[FIRST] && ANY_UNDER(FIRST) -> bring_back(FIRST) }; free(ADMINISTRATOR)
#ifdef RETURN_WITHOUT_LOCK
	/* Broken on purpose: the message goes back under a credit of the first queue without that queue's lock. */
	:: atomic { removed[SECOND] && ANY_UNDER(SECOND) -> bring_back(SECOND) }; free(ADMINISTRATOR)
#else
	:: atomic { removed[SECOND] && ANY_UNDER(SECOND) && !locked[FIRST] -> bring_back(SECOND) }; free(ADMINISTRATOR)
#endif
	od
}

/* Sends a message again, or renames it and keeps its name: back to the first queue, or out of the graph. */
proctype somebody() provided (!closed)
{
	byte m;

end:	do
	:: atomic {
		if
		:: IN(ELSEWHERE, 0) -> m = 0
		:: IN(ELSEWHERE, 1) -> m = 1
		fi;
		rename(ELSEWHERE, m, FIRST, VIA(ELSEWHERE, m));
		m = 0 }
	:: atomic {
		if
		:: IN(SECOND, 0) -> m = 0
		:: IN(SECOND, 1) -> m = 1
		fi;
		if
		:: rename(SECOND, m, FIRST, VIA(SECOND, m))
		:: rename(SECOND, m, ELSEWHERE, VIA(SECOND, m))
		fi;
		m = 0 }
	:: atomic {
		if
		:: IN(THIRD, 0) -> m = 0
		:: IN(THIRD, 1) -> m = 1
		fi;
		if
		:: rename(THIRD, m, FIRST, VIA(THIRD, m))
		:: rename(THIRD, m, ELSEWHERE, VIA(THIRD, m))
		fi;
		m = 0 }
	od
}

/* Nobody is about anything. */
#define QUIET (!locked[FIRST] && !locked[SECOND] && !owed[WORKER] && !owed[ADMINISTRATOR])

/* All others are dead: look twice at each queue, at the end of the chain first, and see. */
proctype last_sweep()
{
	byte k;

	atomic {
		QUIET;
		closed = true;
		look(LAST_SWEEP, SECOND);
		look(LAST_SWEEP, SECOND);
		look(LAST_SWEEP, FIRST);
		look(LAST_SWEEP, FIRST);
		/* Promise: in the end there is one credit for each message that lies under one, and no other. */
		assert(COUNT(SECOND) == IN(THIRD, 0) + IN(THIRD, 1));
		assert(COUNT(FIRST) == IN(SECOND, 0) + IN(SECOND, 1) + IN(THIRD, 0) + IN(THIRD, 1))
	};
end:	do
	:: closed /* nothing more happens */
	od
}

init
{
	atomic {
		queue[FIRST].name[0] = 1;
		queue[FIRST].name[1] = SENT - 1;
		run router(0);
#ifndef TWO_EACH
		run router(1);
#endif
		run worker();
		run sweep();
		run administrator();
		run somebody();
		run last_sweep()
	}
}
