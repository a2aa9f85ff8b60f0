/* The core of the lease protocol, for an exhaustive search with spin. See docs/model.md.
 *
 * One owner with one block, two readers, two replicas of the lease service over one row.
 * Each step is one atomic transition: of the row (a committed transaction), of the owner's
 * engine or of a reader. Between two steps anything else may happen, and any time pass.
 *
 * Besides: -DAGAIN, the block is pinned again for other content; -DEPOCHS, workers are
 * thought dead, or killed and started again; -DLONGER, a hold is made longer.
 * -DONLY=n checks one property. Faults and dropped assumptions: faults.h.
 */
#ifndef HOLD
#define HOLD   5        /* how long the owner holds, in ticks */
#endif
#define TTL    2        /* what a grant, a BeginRead or a renewal gives */
#ifndef CLOCK
#define CLOCK  HOLD     /* the clock stops here: the first hold is over then */
#endif
#define SKEW   1        /* the owner's clock is at most so much ahead when its hold ends */
#define LAG    1        /* a sweep comes at most so late */
#define SLACK  1        /* what may be being read is swept so long after its lease's end */
#ifdef AGAIN
#define PINS   2
#else
#define PINS   1
#endif

#ifdef ONLY
#define CHECK(property, holds) assert(property != ONLY || (holds))
#else
#define CHECK(property, holds) assert(holds)
#endif
#define READS  1        /* nothing is freed under a read whose result is used */
#define ONE    2        /* at most one reader for an ownership */
#define HOLDS  3        /* a lease ends before the hold, and at its holder no later */
#define TOKENS 5        /* what is read is what the reader's prompt says */
#define EPOCH  6        /* an ended epoch owns nothing; its messages change nothing */
#define DEAD   7        /* a silent reader blocks for no longer than its lease */
#define RENEW  8        /* renewal never revives */
#define TWICE  9        /* a request sent twice gets the first answer */

mtype = { GONE, HELD, LEASED };                   /* ownership; GONE: ended, however */
mtype = { ENDED, GRANTED, READING };              /* lease */
mtype = { NONE, GRANT, BEGIN, EXTEND, UNUSED, CONSUMED };       /* a reader's requests */
mtype = { YES, NO };                              /* answers */
mtype = { ASKING, PERMIT, READ, OVER };           /* a reader's phase */

byte now;               /* the database's clock; a reader's may be SLOW ticks behind */

/* The row: the newest ownership, its newest lease, and what was answered. */
byte own_n;             /* which pinning it is; stands for its handle and its digests */
mtype own = GONE, lease = ENDED;
byte own_epoch, hold_end, token, lease_end;
bool draining;
byte answered[2], first[2];     /* to the grant of each reader, and its ghost; token or: */
#define REFUSED 9
byte epoch = 1;         /* of the owner, as the lease service knows it */
bool free_now, hold_longer, hold_asked;         /* the outbox; hold longer is asked once */

/* The two replicas: each may have received one request and not committed it yet. They are
 * alike, so it is enough to keep what they have in order. */
chan replicas = [2] of { mtype, byte };

/* The owner. Its one block holds what `pin` names; once freed, something else at once. */
byte pin, pins, until;
byte registered = 1, own_idea = 1;      /* its epoch in the registry, and as it believes */
byte dead_upto;         /* pinnings up to this one died with their process */
chan says = [1] of { byte, byte, byte };        /* pinning, epoch, hold's end or 0: freed */

/* The readers. */
mtype phase[2] = ASKING, call[2] = GRANT, answer[2] = NONE;
byte mine[2];           /* the token of its lease */
byte reads[2], sent[2], offer[2], valid[2];
byte notify[2];         /* the transfer's notification, on its way to the owner */
bool other[2];          /* its prompt begins with other tokens than what it would read */
bool spoiled[2];        /* ghost: the block was freed since the read began */
byte used;              /* ghost: the pinning that was last begun to be read */

#define LIVE         (lease != ENDED)
#define USABLE       (LIVE && now < lease_end)
#define MAX(a, b)    ((a) > (b) -> (a) : (b))
#define MIN(a, b)    ((a) < (b) -> (a) : (b))
#define NEW_END(t)   MIN(now + t, hold_end - MARGIN)
#define PERMITTED(r) ((phase[r] == PERMIT || phase[r] == READ) && STILL(r))
#define SWEPT_AT     (lease_end + (lease == GRANTED -> 0 : SLACK))
#include "faults.h"

/* ---- The lease service: services/kvplane/lease/domain.py, function by function. */

inline held_again() { if :: now < hold_end -> own = HELD :: else -> own = GONE fi }

inline give_back() {    /* FreeNow, repeated until carried out; moot for blocks that are free */
    own = GONE; free_now = (pin == own_n)
}

inline drained() { draining = false; give_back() }      /* a lost owner may be back, too */

inline free() {         /* the session ends, or the lease is revoked */
    if
    :: own == HELD -> give_back()
    :: lease == GRANTED -> lease = ENDED; give_back()
    :: lease == READING -> lease = ENDED; DRAIN
    fi
}

inline release(r, consumed) {
    if
    :: IS_OF(r) && LIVE -> lease = ENDED;
        if :: consumed -> own = GONE :: else -> held_again() fi
    :: IS_OF(r) && draining -> drained()
    :: else
    fi
}

inline expire() {
    if
    :: lease == GRANTED -> held_again()
    :: lease == READING -> AFTER_EXPIRY
    :: else -> drained()
    fi;
    lease = ENDED
}

inline withdraw() { lease = ENDED; draining = false; own = GONE }

inline lose_owner(e) {  /* its process may live, so a read drains */
    epoch = e;
    if
    :: own != GONE && own_epoch < e ->
        if :: lease == READING -> draining = true :: else fi;
        lease = ENDED; own = GONE
    :: else
    fi
}

inline lose_holder() {  /* it may live too; its messages find no live lease any more */
    if
    :: lease == GRANTED -> lease = ENDED; held_again()
    :: lease == READING -> lease = ENDED; draining = true
    fi
}

inline report(n, e, u) {        /* a message of the owner's stream */
    if :: e > epoch -> lose_owner(e) :: else fi;
    if
    :: !STALE(e) && u == 0 -> if :: n == own_n -> withdraw() :: else fi
    :: !STALE(e) && u != 0 && n == own_n ->
        if :: own != GONE -> hold_end = MAX(hold_end, u) :: else fi
    :: !STALE(e) && u != 0 && n > own_n ->
        withdraw();             /* one block: what was in it is certainly freed */
        own_n = n; own = HELD; own_epoch = e; hold_end = HOLD_OF(u)
    :: else
    fi
}

inline grant(r) {
    if
    :: REMEMBERED(r) != 0 -> yes = (answered[r] == token && USABLE)
    :: REMEMBERED(r) == 0 ->
        yes = (GRANTABLE && now < hold_end && NEW_END(TTL) >= now + 1);
        if
        :: yes -> token++; lease_end = NEW_END(TTL); answered[r] = token;
            own = LEASED; lease = GRANTED; draining = false
        :: else -> answered[r] = REFUSED
        fi;
        CHECK(TWICE, first[r] == 0 || first[r] == answered[r]);
        first[r] = answered[r]
    fi
}

inline extend(r, t) {   /* BeginRead, and renewal */
    yes = IS_OF(r) && EXTENDABLE;
    if
    :: yes -> CHECK(RENEW, USABLE);
        if :: kind == BEGIN || lease == ENDED -> lease = READING :: else fi;
        lease_end = EXTENDED(t)
    :: else
    fi
}

inline reply(r) {
    if
    :: kind == UNUSED || kind == CONSUMED -> call[r] = NONE
    :: else ->
        answer[r] = (yes -> YES : NO);
        if
        :: yes && kind == GRANT -> mine[r] = answered[r]
        :: yes && kind == BEGIN -> offer[r] = OFFER(r); reads[r] = own_n
        :: yes && kind == EXTEND -> offer[r] = OFFER(r)
        :: else
        fi;
        sent[r] = 0
    fi
}

/* A reader repeats a request until it is answered, so both replicas may have copies of it.
 * One commits later, perhaps when the reader has long moved on; the answer arrives, or is
 * lost after the commit; or the replica dies with the request and starts again. */
proctype Replicas() {
    mtype kind = NONE; byte r; bool yes;
    do
    :: d_step { nfull(replicas) && call[0] != NONE && answer[0] == NONE -> replicas!!call[0], 0 }
        /* The readers are alike too: 0 is the one whose grant commits first. */
    :: d_step { nfull(replicas) && call[1] != NONE && answer[1] == NONE && answered[0] != 0 ->
        replicas!!call[1], 1 }
    :: atomic { replicas??kind, r ->
        if
        :: kind == GRANT -> grant(r)
        :: kind == BEGIN || kind == EXTEND -> extend(r, TTL)
        :: kind == EXTEND -> extend(r, 1)               /* asks for less */
        :: kind == UNUSED || kind == CONSUMED -> release(r, kind == CONSUMED)
        fi;
        if :: call[r] == kind -> reply(r) :: true fi;
        kind = NONE; r = 0; yes = false }
    :: atomic { replicas??kind, r -> ON_RESTART; kind = NONE; r = 0 }
    od
}

/* ---- A reader: services/kvplane/worker/reads.py and reading.py. */

inline say(r, request) { call[r] = request; answer[r] = NONE; sent[r] = 0; offer[r] = 0 }

inline over(r, request) {
    say(r, request); phase[r] = OVER;
    reads[r] = 0; valid[r] = 0; spoiled[r] = false; other[r] = false
}

proctype Reader(byte r) {
    do
    :: d_step { answer[r] == YES && call[r] == GRANT -> say(r, BEGIN); sent[r] = now }
    :: d_step { answer[r] == NO && phase[r] == ASKING -> over(r, NONE) }
        /* A client repeats itself, and brings the lease of one request in another one. */
    :: d_step { phase[r] == ASKING && call[r] == GRANT && mine[1 - r] != 0 -> ON_SAME_LEASE(r) }
    :: atomic { answer[r] == YES && call[r] == BEGIN -> valid[r] = TAKEN(r);
        if :: other[r] = true :: other[r] = false fi;   /* the digests that came with it */
        if
        :: STILL(r) && MATCHES(r) -> phase[r] = PERMIT; say(r, NONE)
        :: else -> over(r, UNUSED)
        fi }
    :: d_step { call[r] == NONE && PERMITTED(r) -> say(r, EXTEND); sent[r] = now }
    :: d_step { answer[r] != NONE && call[r] == EXTEND ->
        /* Not renewed: it goes on until its own deadline, which is the worst it may do. */
        if :: answer[r] == YES -> valid[r] = MAX(valid[r], TAKEN(r)) :: else fi;
        say(r, NONE) }
    :: d_step { phase[r] == PERMIT && STILL(r) ->       /* the read begins */
        CHECK(ONE, used != reads[r]); used = reads[r];
        spoiled[r] = (pin != reads[r]); phase[r] = READ }
    :: d_step { phase[r] == PERMIT -> over(r, UNUSED) } /* no longer wanted, or too late */
    :: d_step { phase[r] == READ ->                     /* the transfer is over */
        if
        :: FAILS(r) -> over(r, NONE)                    /* left to lapse */
        :: else ->
            if
            :: KEPT(r) -> CHECK(READS, !spoiled[r]); CHECK(TOKENS, !other[r])
            :: else                                     /* dropped */
            fi;
            if :: pin == reads[r] -> notify[r] = pin :: else fi;
            over(r, AFTER_READ)
        fi }
    :: atomic { phase[r] != OVER ->                     /* dies, or its transfer fails */
        if :: phase[r] == READ && pin == reads[r] -> notify[r] = pin :: true fi;
        over(r, NONE) }
    :: d_step { phase[r] == OVER && call[r] != NONE -> say(r, NONE) }   /* gives up */
    od
}

/* ---- The owner's engine and agent. */

inline tell(u) { if :: nfull(says) -> says!pin, own_idea, u :: full(says) fi }

inline reuse() {
    if :: phase[0] == READ && reads[0] == pin -> spoiled[0] = true :: else fi;
    if :: phase[1] == READ && reads[1] == pin -> spoiled[1] = true :: else fi;
    if :: notify[0] == pin -> notify[0] = 0 :: else fi;
    if :: notify[1] == pin -> notify[1] = 0 :: else fi;
    pin = 0; until = 0; free_now = false; hold_longer = false
}

proctype Owner() {
    do
    :: d_step { pin == 0 && pins < PINS && nfull(says) ->
        pins++; pin = pins; until = now + HOLD; tell(until) }
    :: d_step { pin != 0 && (now + SKEW >= until        /* its hold is over, by its clock */
            || notify[0] == pin || notify[1] == pin     /* somebody has read it */
            || free_now) ->                             /* it was told to */
        tell(0); reuse() }
    :: d_step { pin != 0 && hold_longer && nfull(says) ->
        hold_longer = false; until++; tell(until) }
    :: d_step { own_idea < registered -> own_idea = registered; ON_NEW_EPOCH }
    od
}

/* ---- What else happens. */

proctype World() {
    byte n, e, u;
    do
    :: d_step { says?n, e, u -> report(n, e, u); n = 0; e = 0; u = 0 }
    :: d_step { OVERDUE(0) -> expire() }
    :: d_step { own == HELD && now >= hold_end -> own = GONE }
    :: d_step { own == HELD || LIVE -> free() }
        /* Whoever passed the lease on, a router or a gateway, does not want it used any more. */
    :: d_step { NEVER_BEGUN -> lease = ENDED; held_again() }
#ifdef LONGER
    :: d_step { !hold_asked && LIVE && pin == own_n ->
        hold_asked = true; hold_longer = true; ON_HOLD_ORDER }
#endif
#ifdef EPOCHS
    :: d_step { registered == 1 -> registered = 2 }     /* the owner is thought dead */
    :: d_step { registered == 1 -> registered = 2;      /* killed, and back with a new epoch */
        own_idea = 2; dead_upto = pins; reuse() }
    :: d_step { epoch < registered -> lose_owner(registered) }
    :: d_step { LIVE -> lose_holder() }                 /* the reader is thought dead */
#endif
    :: d_step { now < CLOCK ->
        if :: OVERDUE(LAG) -> expire() :: else fi;
        now++;
        CHECK(DEAD, !(LIVE || draining) || now <= SWEPT_AT + LAG) }
    od
}

#define I_ONE   (!(PERMITTED(0) && PERMITTED(1) && reads[0] == reads[1]) \
    && !(own == HELD && PERMITTED(0) && reads[0] == own_n) \
    && !(own == HELD && PERMITTED(1) && reads[1] == own_n) \
    && (!LIVE || own == LEASED))
#define I_HOLDS ((!LIVE || lease_end + SKEW <= hold_end) \
    && (own == GONE || pin != own_n || hold_end <= until) \
    && !(PERMITTED(0) && mine[0] == token && valid[0] > lease_end) \
    && !(PERMITTED(1) && mine[1] == token && valid[1] > lease_end))
#define I_EPOCH (own == GONE || own_epoch == epoch)

proctype Monitor() {    /* looks at every state */
    do
    :: atomic { !(I_ONE && I_HOLDS && I_EPOCH) ->
        CHECK(ONE, I_ONE); CHECK(HOLDS, I_HOLDS); CHECK(EPOCH, I_EPOCH) }
    od
}

init {
    atomic {
        pins = 1; pin = 1; until = HOLD; tell(until);   /* the clock starts with a pinning */
        run Replicas(); run Owner(); run Reader(0); run Reader(1); run World(); run Monitor()
    }
}
