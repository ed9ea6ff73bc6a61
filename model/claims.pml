/* The claims of a queue: who holds a message, and who may settle it (docs/protocol.md, rules 1 and 2).

   Two consumers, a sweep and an administrator share two messages. Each step is one call of the file system; what a
   rename does, and what the model writes down about it, is bound by d_step. Nothing is bounded: there is any number
   of claims, extensions, deaths and requeues. The unique part of a claim that stands in no name and in nobody's memory
   any more serves again, and so does a deadline: nobody can tell either from a new one.

   A folder maps a name to the message that lies there under it. Each message has a unique name. Both have the same
   name from their sender, which is theirs in processed/ and error/ where it is free. */

#define MESSAGES  2
#define CONSUMERS 2
#define SENDERS   2                     /* the sender's name in a folder, after the two unique ones */
#define NO        0
#define DUE       1
#define YES       2
#define GONE      3                     /* the owner in a name that no file will have again */
#define CURRENT   0                     /* a claim's deadline, and one that it had before */
#define OLD       1
#define NOBODY    0
#define DEAD      3                     /* in the place of a holder, who is 1 or 2 */

typedef Folder { byte file[3] };        /* by name: 1 + the message, 0 where there is no such file */

Folder working, target, processing, processed, error;

/* The rest of a claim's name in processing/, by its message: its unique part, its deadline. */
byte owner[MESSAGES];
bool lapsed[MESSAGES];                  /* that deadline is over */

byte holder[MESSAGES];                  /* 1 + who made the claim, or DEAD: then its subscription's lock is free */
bool acked[MESSAGES];                   /* an ack has succeeded since it was sent or requeued */

/* What a consumer remembers of its claim: the receipt. */
byte my_message[CONSUMERS];
byte my_owner[CONSUMERS];
byte my_deadline[CONSUMERS];
mtype doing[CONSUMERS];                 /* how it is about to settle it, */
byte name[CONSUMERS];                   /* under which name in processed/ or error/, */
byte looked[CONSUMERS];                 /* and whether it looks, or has looked, for a claim that was extended */

/* What the sweep saw in its listing, and means to take. */
byte seen_owner[MESSAGES];
byte seen_deadline[MESSAGES];

bool closing;                           /* all but the sweep stand still from now on */

mtype = { ACK, NACK, REJECT };          /* how a claim is settled */
mtype = { DONE, MISSING, EXISTS };      /* what a rename says */

/* -- the promises ------------------------------------------------------------------------------------------------- */

#define IN(folder, m) ((folder.file[m] == m + 1) + (folder.file[SENDERS] == m + 1))
#define PLACES(m)     (IN(working, m) + IN(target, m) + IN(processing, m) + IN(processed, m) + IN(error, m))

/* What is true after every rename. */
inline promises()
{
	/* Promise 1: a message is in one place at any time, and never gone. */
	assert(PLACES(0) == 1 && PLACES(1) == 1);
	/* Promise 1: an ack that succeeded is final; the message leaves processed/ by a requeue alone, which is counted. */
	assert((!acked[0] || IN(processed, 0)) && (!acked[1] || IN(processed, 1)))
}

/* -- names -------------------------------------------------------------------------------------------------------- */

/* Return a unique part that no file has, and nobody remembers. */
inline new_owner(o)
{
	o = 1;
#ifndef SHARED_NAMES
	/* With SHARED_NAMES the model is broken on purpose, so that its assertions are seen to fail: a claim's file name
	   has no unique part, and a late ack of a lost claim finds the next holder's file. */
	if
	:: owner[0] == o || owner[1] == o -> o++
	:: else
	fi
#endif
}

/* Who remembers a claim that has left processing/ remembers a name that no file will ever have again. Which one it was
   makes no difference any more. */
inline outlive(known_owner, known_deadline, msg)
{
	if
#ifndef SHARED_NAMES
	:: known_owner == owner[msg] -> known_owner = GONE; known_deadline = 0
#endif
	:: else
	fi
}

/* The same for a deadline, when the claim has got another. */
inline outdate(known_message, known_owner, known_deadline, msg)
{
	if
	:: known_message == msg && known_owner == owner[msg] -> known_deadline = OLD
	:: else
	fi
}

#define THERE(m, o, d) (processing.file[m] && owner[m] == o && d == CURRENT)

/* -- the renames out of processing/ ------------------------------------------------------------------------------- */

inline leave(msg, folder, slot)
{
	folder.file[slot] = processing.file[msg];
	processing.file[msg] = 0;
	outlive(my_owner[0], my_deadline[0], msg);
	outlive(my_owner[1], my_deadline[1], msg);
	outlive(seen_owner[msg], seen_deadline[msg], msg);
	owner[msg] = 0;
	lapsed[msg] = false;
	holder[msg] = NOBODY;
	result = DONE
}

/* Settle the claim of this very name, of which `rightful` says whether it may be. Nothing is replaced in processed/ and
   error/; target/ trusts in unique names. */
inline settle(verb, o, d, kept, rightful)
{
	if
	:: !THERE(m, o, d) -> result = MISSING
	:: else ->
		/* Promise 2: nobody settles a claim that is not theirs; a sweep takes what is dead or over, and not renewed. */
		assert(rightful);
		if
		:: verb == ACK && processed.file[kept] -> result = EXISTS
		:: verb == REJECT && error.file[kept] -> result = EXISTS
		:: verb == ACK && !processed.file[kept] ->
			leave(m, processed, kept);
			/* Promise 2: each message is acknowledged at most once per send or requeue. */
			assert(!acked[m]);
			acked[m] = true
		:: verb == REJECT && !error.file[kept] -> leave(m, error, kept)
		:: verb == NACK -> leave(m, target, m)
		fi
	fi
}

inline orphan(msg)
{
	if
	:: holder[msg] == me + 1 -> holder[msg] = DEAD
	:: else
	fi
}

/* -- who takes part ----------------------------------------------------------------------------------------------- */

#define MY_CLAIM THERE(my_message[me], my_owner[me], my_deadline[me])

inline forget()
{
	my_message[me] = 0;
	my_owner[me] = 0;
	my_deadline[me] = 0;
	doing[me] = 0;
	name[me] = 0;
	looked[me] = 0
}

/* Settle by the name that is remembered, and see what is to be done next. */
inline try()
{
	m = my_message[me];
	settle(doing[me], my_owner[me], my_deadline[me], name[me], holder[m] == me + 1);
	promises();
	if
	:: result == EXISTS -> name[me] = m; looked[me] = NO /* the sender's name is taken: its own is not */
	:: result == MISSING && looked[me] == NO -> looked[me] = DUE
	:: else -> forget() /* it is done, or the lease was lost */
	fi;
	m = 0;
	result = 0
}

/* Holds one message at a time. It may have lost it long ago, and finds out by its next call. */
proctype consumer(byte me)
{
	byte m, o;
	mtype result;

end:	do
	:: atomic { /* claim; which of those that wait does not matter */
		!closing && !my_owner[me] && (target.file[0] || target.file[1]);
		if
		:: target.file[0] -> m = 0
		:: target.file[1] -> m = 1
		fi;
		d_step {
			new_owner(o);
			my_message[me] = m;
			my_owner[me] = o;
			processing.file[m] = target.file[m]; /* it would replace: the name must be unique */
			target.file[m] = 0;
			owner[m] = o;
			holder[m] = me + 1;
			m = 0;
			o = 0;
			promises()
		} }
	:: atomic { /* extend */
		my_owner[me] && !doing[me] && MY_CLAIM;
		d_step {
			m = my_message[me];
			/* Promise 2: nobody extends a claim that is not theirs. */
			assert(holder[m] == me + 1);
			outdate(my_message[0], my_owner[0], my_deadline[0], m);
			outdate(my_message[1], my_owner[1], my_deadline[1], m);
			outdate(m, seen_owner[m], seen_deadline[m], m);
			lapsed[m] = false
		};
		if
		:: my_deadline[me] = CURRENT
		:: skip /* another process did, that has the receipt too, and this one does not know */
		fi;
		m = 0 }
	:: atomic { /* ack, nack or reject: the first try */
		my_owner[me] && !doing[me];
		if
		:: doing[me] = ACK; name[me] = SENDERS
		:: doing[me] = REJECT; name[me] = SENDERS
		:: doing[me] = NACK
		fi;
		try() }
	:: atomic { /* the file is gone: look for the claim under another deadline */
		doing[me] && looked[me] == DUE;
		m = my_message[me];
		if
		:: processing.file[m] && owner[m] == my_owner[me] -> my_deadline[me] = CURRENT; looked[me] = YES
		:: else -> forget()
		fi;
		m = 0 }
	:: atomic { /* the next try */
		doing[me] && looked[me] != DUE;
		try() }
	:: atomic { /* die, at any step; it comes back as another subscription */
		my_owner[me];
		orphan(0);
		orphan(1);
		forget() }
	od
}

inline list(msg)
{
	if
	:: processing.file[msg] && (lapsed[msg] || holder[msg] == DEAD) ->
		seen_owner[msg] = owner[msg];
		seen_deadline[msg] = CURRENT
	:: else
	fi
}

/* Lists what the dead hold and what has lapsed; then returns it, or sets it aside where a limit is reached. */
proctype sweep()
{
	byte m;
	byte to = SENDERS;
	mtype how, result;
	bool last;

	do
	:: d_step { !seen_owner[0] && !seen_owner[1] && !last -> last = closing; list(0); list(1) }
	:: atomic { /* return one of them; its listing may be old by now */
		seen_owner[0] || seen_owner[1];
		if
		:: seen_owner[0] && to != 1 -> m = 0
		:: seen_owner[1] && to != 0 -> m = 1
		fi;
		if
		:: how = NACK
		:: how = REJECT
		fi;
		d_step {
			settle(how, seen_owner[m], seen_deadline[m], to, lapsed[m] || holder[m] == DEAD);
			promises();
			if
			:: result == EXISTS -> to = m /* the sender's name is taken: its own is not */
			:: else -> seen_owner[m] = 0; seen_deadline[m] = 0; to = SENDERS
			fi;
			m = 0;
			how = 0;
			result = 0
		} }
	:: d_step { !last && (seen_owner[0] || seen_owner[1]) -> /* die: the next one lists anew */
		seen_owner[0] = 0; seen_deadline[0] = 0;
		seen_owner[1] = 0; seen_deadline[1] = 0;
		to = SENDERS }
	:: last && !seen_owner[0] && !seen_owner[1] -> break
	od;
	/* Promise 1: what a dead or a stuck consumer held comes back, or is settled. */
	assert(!processing.file[0] && !processing.file[1])
}

inline send(msg)
{
	target.file[msg] = working.file[msg];
	working.file[msg] = 0;
	promises()
}

/* Take whatever has a name by now, whatever it was when the name was listed. */
inline requeue(folder, listed)
{
	m = folder.file[listed] - 1;
	target.file[m] = folder.file[listed];
	folder.file[listed] = 0;
	acked[m] = false;
	m = 0;
	promises()
}

/* Sends the messages, and requeues what lies in processed/ and error/. */
proctype administrator()
{
	byte m;

end:	do
	:: d_step { !closing && working.file[0] -> send(0) }
	:: d_step { !closing && working.file[1] -> send(1) }
	:: d_step { !closing && processed.file[0] -> requeue(processed, 0) }
	:: d_step { !closing && processed.file[1] -> requeue(processed, 1) }
	:: d_step { !closing && processed.file[SENDERS] -> requeue(processed, SENDERS) }
	:: d_step { !closing && error.file[0] -> requeue(error, 0) }
	:: d_step { !closing && error.file[1] -> requeue(error, 1) }
	:: d_step { !closing && error.file[SENDERS] -> requeue(error, SENDERS) }
	od
}

/* Who holds this one at the end is dead, or is stuck, and its lease runs out. */
inline give_up(msg)
{
	if
	:: processing.file[msg] -> lapsed[msg] = true
	:: processing.file[msg] -> holder[msg] = DEAD
	:: else
	fi
}

/* A lease runs out at any step; at any step all but the sweep stop for good. */
proctype time()
{
	byte me;

	do
	:: d_step { processing.file[0] && !lapsed[0] -> lapsed[0] = true }
	:: d_step { processing.file[1] && !lapsed[1] -> lapsed[1] = true }
	:: atomic {
		closing = true;
		give_up(0);
		give_up(1);
		forget();
		me = 1;
		forget();
		me = 0 };
		break
	od
}

init
{
	atomic {
		working.file[0] = 1;
		working.file[1] = 2;
		run consumer(0);
		run consumer(1);
		run sweep();
		run administrator();
		run time()
	}
}
