/* Messages go to another root, and come back (docs/protocol.md, "Moves to another file system"; carrier/lists.py).

   Root A owns messages, and root B takes them. A giver renames them from A's target/ into the row, where they are
   nobody's. Carriers settle the newest list of the row, and write the next one. A forward list is settled by a job at
   B: stage copies, look again which messages are here, commit by one rename, roll forward, and unlink here. A back list
   is settled by renames to A's target/, and B knows nothing of it. Any carrier may write a list of either kind: one of
   what a list left out, and one that recalls, are back lists. A consumer takes from A's target/; what is in B's stays.

   Three carriers share one message; with TWO_MESSAGES two carriers share two; with FIVE_LISTS two share one, and make
   more lists of it. With PROXIED somebody ends the row without an answer of B; with RESTORED, A is an older state of
   itself. Anybody may sleep between two steps, or die: to be dead is to make no further step, or to begin anew as
   another. Each step is one call of the file system, but that a folder is listed, older lists are removed, and a
   committed job is rolled forward, in one (jobs.pml takes the last apart), and that looks are one step where nothing
   hangs on their order. After every change it is judged what one more bridge and sweep would leave. */

#ifdef RESTORED
#define TWO_MESSAGES
#endif
#ifdef TWO_MESSAGES
#define MESSAGES  2
#define CARRIERS  2
#endif
#ifdef FIVE_LISTS
#define CARRIERS  2
#define LISTS     5
#define NAMES     4
#endif
#ifndef MESSAGES
#define MESSAGES  1
#endif
#ifndef CARRIERS
#define CARRIERS  3
#endif
#ifndef LISTS
#define LISTS     3                     /* numbers of lists go from 1 to this */
#define NAMES     2                     /* how often a message is given at most, each time under a name that is new */
#endif

/* A set of names in the row is a mask. */
#define NAME(m, turn) (1 << (4 * (m) + (turn)))
#define IN(m, names)  (((names) >> (4 * (m))) & 15)
#define COUNT(m, names) ((IN(m, names) & 1) + (IN(m, names) >> 1 & 1) + (IN(m, names) >> 2 & 1) + (IN(m, names) >> 3))
#define FIRST(names)  ((names) & -(names))

typedef List {
	bool there;
	bool back;
	byte names
};

List list[LISTS + 1];                   /* ROW/N.json */
byte row;                               /* the names in ROW/target */
byte home[MESSAGES];                    /* how often a message is in A's target/ */
byte gone[MESSAGES];                    /* how often it was consumed at A, or came to B, where it is consumed, too */
byte turn[MESSAGES];                    /* how often it was given */

byte job;                               /* the list whose job is committed at B and not rolled forward; 0 for none; */
byte job_list, job_sent;                /* the names of that list, and which of them were sent */
byte ledger;                            /* the last list in the ledger at B; */
byte ledger_list, ledger_sent;          /* its names, and which of them were sent: the others were left */

byte number[CARRIERS];                  /* the list that a carrier is about; */
bool attempt[CARRIERS];                 /* its attempt is in the folder of that list's job; */
byte sure[CARRIERS];                    /* which copies it commits, after it looked again */

bool ended;                             /* the row is ROW.ended; */
byte ended_row;                         /* what is in ROW.ended/target; */
byte risk;                              /* of which names B had a copy, or may get one, when the row was ended */
byte old;                               /* which names were in the row in the backup */
byte out;                               /* what somebody has taken out of the row to look at it (RENAME_THEN_LOOK) */

byte newest_, stays_, last_, list_, sent_; /* 0 between any two steps */

inline find_newest(n)
{
	n = LISTS;
	do
	:: n && !list[n].there -> n--
	:: else -> break
	od
}

#define TOTAL(m)  (home[m] + gone[m] + COUNT(m, job_sent) + COUNT(m, stays_))

/* Promise: after one more bridge and sweep each message is in a target/, or consumed, once; and nothing is in the row.
   Of a row that was ended, what B may have had may come twice. */
inline promises()
{
	find_newest(newest_);
	if
	:: job > ledger -> last_ = job; list_ = job_list; sent_ = job_sent
	:: else -> last_ = ledger; list_ = ledger_list; sent_ = ledger_sent
	fi;
	stays_ = row | ended_row | out;
	if
	:: ended /* all of it comes home */
	:: !ended && last_ > newest_ ->
#ifdef RESTORED
		/* A is an older state, and B takes nothing more from the row. Promise: in it is only what the backup had in it,
		   which B has by now. */
		assert(!(row & ~old));
		stays_ = 0
#else
		/* Promise: nobody takes A for an older state that is none. */
		assert(false)
#endif
	:: !ended && last_ && last_ == newest_ && !list[newest_].back ->
		/* B takes nothing more from the row if it has another list of this number. */
		assert(!row || list_ == list[newest_].names);
		stays_ = stays_ & ~sent_
	:: else
	fi;
	assert(TOTAL(0) == 1 || (TOTAL(0) == 2 && IN(0, risk)));
#if MESSAGES > 1
	assert(TOTAL(1) == 1 || (TOTAL(1) == 2 && IN(1, risk)));
#endif
	newest_ = 0;
	stays_ = 0;
	last_ = 0;
	list_ = 0;
	sent_ = 0
}

#define CUT_OFF(c) if :: number[c] == job -> attempt[c] = false :: else fi

/* Move what is committed to B's target/, write the ledger, and remove the folder, with what others staged in it. */
inline roll_forward()
{
	CUT_OFF(0);
	CUT_OFF(1);
	gone[0] = gone[0] + COUNT(0, job_sent);
#if MESSAGES > 1
	gone[1] = gone[1] + COUNT(1, job_sent);
#endif
#if CARRIERS > 2
	CUT_OFF(2);
#endif
	if
	:: job > ledger -> ledger = job; ledger_list = job_list; ledger_sent = job_sent
	:: else
	fi;
	job = 0;
	job_list = 0;
	job_sent = 0
}

inline come_home(name)
{
	if
	:: IN(0, name) -> home[0]++
	:: else -> home[MESSAGES - 1]++
	fi
}

/* Take any names of a set: this user may not read the others, or there is no room for them. */
inline choose(names, from)
{
	names = from;
	if :: IN(0, names) -> names = names & ~15 :: true fi;
	if :: IN(1, names) -> names = names & 15 :: true fi
}

#define ME        number[me]
#define OR_DIE    :: goto died

/* What is to be unlinked here, by the ledger's entry. */
inline read_note()
{
	if
	:: ledger == ME && ledger_list == names -> found = names & ledger_sent
	:: else -> goto died
	fi;
	names = 0
}

proctype carrier(byte me)
{
	byte names, found;

	/* The newest list is read between two looks that both show it as the newest: thus here in one step. */
end:
begin:	atomic { !ended -> find_newest(ME);
#if defined(RESTORED) && !defined(RECALL_UNCHECKED)
		/* Who carries, or recalls, looks first whether this is an older state. RECALL_UNCHECKED is broken on purpose. */
		if :: ledger > ME -> ME = 0; goto begin :: else fi;
#endif
		if :: !ME -> goto settled :: else fi;
#ifdef READ_ONCE
		/* Broken on purpose: it does not look again. What it reads was written by one who woke late, under a number
		   that was free again. */
		goto read
	};
read:	atomic {
		if :: list[ME].there :: else -> goto died fi;
#endif
		names = list[ME].names;
		if :: list[ME].back -> goto bring :: else fi
	};
	if
	:: atomic { job == ME -> roll_forward(); promises(); read_note(); goto unlink } /* it is committed: finish it */
	:: atomic { job != ME && ledger >= ME -> read_note(); goto unlink }
	/* It stages copies, looks again which of them are here, and looks whether the list, or a later one, was sent. What is
	   gone by the second look might as well not have been copied; and what happens between the looks, as well before. */
#ifndef LOOK_ONCE
	:: atomic { job != ME && ledger < ME -> attempt[me] = true; choose(found, names & row); sure[me] = found; found = 0 }
#else
	/* Broken on purpose: it commits what it has copied, whether it is here or not. */
	:: atomic { job != ME && ledger < ME -> attempt[me] = true; choose(found, names & row) };
		d_step { sure[me] = found; found = 0 }
#endif
#ifdef BACK_TOO_SOON
	/* Broken on purpose: what is in the row is recalled before the forward list is settled. */
	:: atomic { names = 0; goto settled }
#else
	/* Nothing of the list is here any more: who recalls needs no answer of B. */
	:: atomic { !(names & row) -> names = 0; goto settled }
#endif
	OR_DIE
	fi;
	if
	:: d_step { attempt[me] && job != ME -> /* commit: the rename replaces nothing, and the folder is still there */
		if :: job -> roll_forward() :: else fi; /* another list's, by anybody */
		job = ME;
		job_list = names;
		job_sent = sure[me];
		sure[me] = 0;
		attempt[me] = false;
		promises() }
	OR_DIE
	fi;
	if
	:: atomic { if :: job == ME -> roll_forward(); promises() :: else fi; read_note() }
	OR_DIE
	fi;
unlink:	do
	:: d_step { found -> row = row & ~FIRST(found); found = found & ~FIRST(found); promises() }
	:: !found -> break
	OR_DIE
	od;
#ifdef NEWEST_GOES
	/* Broken on purpose: the list is removed once it is settled. */
	atomic { list[ME].there = false; list[ME].names = 0; promises(); goto died };
#endif
	goto settled;

bring:	do
	:: d_step { names ->
		if
		:: row & FIRST(names) -> row = row & ~FIRST(names); come_home(FIRST(names)); promises()
		:: else
		fi;
		names = names & ~FIRST(names) }
	:: !names -> break
	OR_DIE
	od;

settled:
	if
	:: d_step { row && ME < LISTS -> found = row } /* list what is there */
	OR_DIE
	fi;
	if
	:: atomic { !ended && !list[ME + 1].there ->
		list[ME + 1].there = true;
		list[ME + 1].names = found;
		if
		:: list[ME + 1].back = true
		:: list[ME + 1].back = false
		fi;
		found = 0;
		if /* what the ledger says of a list before the newest matters to nobody */
		:: ledger <= ME -> ledger_list = 0; ledger_sent = 0
		:: else
		fi;
		promises() }
	OR_DIE
	fi;
	if
	:: d_step { true -> /* remove older lists */
		do
		:: found < ME -> found++; list[found].there = false; list[found].back = false; list[found].names = 0
		:: else -> break
		od;
		promises() }
	OR_DIE
	fi;
died:
	atomic { ME = 0; names = 0; found = 0; attempt[me] = false; sure[me] = 0;
		goto begin }
}

#ifndef OLD_NAME
#define NEW(m)    NAME(m, turn[m])
#define GIVEN(m)  turn[m]++
#define MAY_GIVE(m) (!ended && home[m] && turn[m] < NAMES)
#else
/* Broken on purpose: a message gets the name that it had in the row before. */
#define NEW(m)    NAME(m, 0)
#define GIVEN(m)  skip
#define MAY_GIVE(m) (!ended && home[m])
#endif
#define GIVE(m)   d_step { MAY_GIVE(m) -> home[m]--; row = row | NEW(m); GIVEN(m); promises() }

/* Renames messages into the row, if B's ledger does not say that this is an older state. */
proctype giver()
{
#ifdef RESTORED
	byte seen, newest;

#endif
end:	do
#ifdef CHECK_LATE
	/* Broken on purpose: it looks after it gave. */
	:: GIVE(0);
		seen = ledger;
		d_step { find_newest(newest); seen = (newest < seen); newest = 0 };
		if :: seen -> break :: else fi
#else
#ifdef RESTORED
	:: d_step { MAY_GIVE(0) -> seen = ledger };
		d_step { find_newest(newest); seen = (newest < seen); newest = 0 };
		if
		:: seen -> break
		:: !seen -> GIVE(0)
		:: !seen -> skip
		fi
#else
	/* It looks first, and finds no older state: that is promised at any time. */
	:: GIVE(0)
#if MESSAGES > 1
	:: GIVE(1)
#endif
#endif
#endif
	od
}

proctype consumer()
{
end:	do
	:: d_step { home[0] -> home[0]--; gone[0]++; promises() }
#if MESSAGES > 1
	:: d_step { home[1] -> home[1]--; gone[1]++; promises() }
#endif
	od
}

#ifdef PROXIED
/* Ends the row by one rename, and brings home all that is in it. */
proctype administrator()
{
	byte last;

end:	do
	:: d_step { !ended ->
		find_newest(last);
		/* What the newest list sent, or is being sent by somebody who has looked, comes twice; and what the backup had. */
		risk = ((job == last) -> row & job_sent : row & ledger_sent) | sure[0] | sure[1] | old;
#if CARRIERS > 2
		risk = risk | sure[2];
#endif
		ended = true;
		ended_row = row;
		row = 0;
		last = 0;
		do /* nobody comes to the lists by their paths any more */
		:: last < LISTS -> last++; list[last].there = false; list[last].back = false; list[last].names = 0
		:: else -> break
		od;
		last = 0;
		promises() }
	:: d_step { ended_row ->
		last = FIRST(ended_row);
		ended_row = ended_row & ~last;
		come_home(last);
		last = 0;
		promises() }
	od
}
#endif

#ifdef RENAME_THEN_LOOK
/* Broken on purpose: it takes a message out of the row, then looks whether it was sent, and otherwise takes it home. */
proctype taker()
{
	bool is_sent;

end:	do
	:: d_step { row -> out = FIRST(row); row = row & ~out; promises() };
		d_step { is_sent = ((out & (job_sent | ledger_sent)) > 0) };
		d_step {
			if
			:: !is_sent -> come_home(out)
			:: else
			fi;
			out = 0;
			is_sent = false;
			promises()
		}
	od
}
#endif

init
{
	atomic {
		home[0] = 1;
#if MESSAGES > 1
		home[1] = 1;
#endif
#ifdef RESTORED
		/* B has got two lists. The backup has the first one, settled or not, or none. The second message was sent since
		   then; the first message is new. */
		home[1] = 0;
		turn[1] = 1;
		old = NAME(1, 0);
		row = old;
		gone[1] = 1;
		ledger = 2;
		if
		:: list[1].there = true; list[1].names = old
		:: list[1].there = true; list[1].names = old; list[1].back = true
		:: list[1].there = true /* whose messages are gone */
		:: true
		fi;
#endif
		run carrier(0);
		run carrier(1);
#if CARRIERS > 2
		run carrier(2);
#endif
		run giver();
		run consumer();
#ifdef PROXIED
		run administrator();
#endif
#ifdef RENAME_THEN_LOOK
		run taker();
#endif
	}
}
