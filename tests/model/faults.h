/* What the model's planted faults (FAULT_x) and dropped assumptions (WITHOUT_x) replace.
 * In each pair the last definition is the protocol. One line each in docs/model.md. */

#ifdef FAULT_NO_MARGIN
#define MARGIN 0
#else
#define MARGIN (SKEW + SLACK)           /* a lease ends so long before the hold */
#endif

/* ---- the lease service */

#ifdef FAULT_DOUBLE_GRANT
#define GRANTABLE (own != GONE)
#else
#define GRANTABLE (own == HELD)
#endif

#ifdef FAULT_ANSWER_FORGOTTEN
#define REMEMBERED(r) 0
#else
#define REMEMBERED(r) answered[r]
#endif

#ifdef FAULT_FENCING_IGNORED
#define IS_OF(r) true
#else
#define IS_OF(r) (token == mine[r])
#endif

#ifdef FAULT_BEGUN_READ_GIVEN_BACK
#define NEVER_BEGUN LIVE
#else
#define NEVER_BEGUN (lease == GRANTED)
#endif

#ifdef FAULT_RENEW_REVIVES
#define EXTENDABLE (own != GONE)
#else
#define EXTENDABLE USABLE
#endif

#ifdef FAULT_RENEWAL_SHORTENS
#define EXTENDED(t) NEW_END(t)
#else
#define EXTENDED(t) MAX(lease_end, NEW_END(t))
#endif

#ifdef FAULT_NO_DRAIN
#define DRAIN give_back()
#else
#define DRAIN draining = true
#endif

#ifdef FAULT_DRAIN_NEVER_ENDS
#define OVERDUE(lag) (LIVE && now >= SWEPT_AT + lag)
#elif defined(FAULT_NO_SLACK)
#define OVERDUE(lag) ((LIVE || draining) && now >= lease_end + lag)
#else
#define OVERDUE(lag) ((LIVE || draining) && now >= SWEPT_AT + lag)
#endif

#ifdef FAULT_EXPIRED_READING_HELD_AGAIN
#define AFTER_EXPIRY held_again()
#else
#define AFTER_EXPIRY give_back()        /* a read may have been sent */
#endif

#ifdef FAULT_EPOCH_IGNORED
#define STALE(e) false
#else
#define STALE(e) (e < epoch)
#endif

#ifdef FAULT_LATE_REPORT_BELIEVED
#define HOLD_OF(u) (now + HOLD)
#else
#define HOLD_OF(u) u                    /* min(now, anchor + elapsed) + hold */
#endif

#ifdef FAULT_HOLD_MOVED_BEFORE_ACK
#define ON_HOLD_ORDER hold_end++
#else
#define ON_HOLD_ORDER skip
#endif

#ifdef FAULT_RESTART_GIVES_FULL_TIME
#define ON_RESTART if :: LIVE -> lease_end = now + TTL :: else fi
#else
#define ON_RESTART skip
#endif

/* ---- a reader */

#ifdef FAULT_HOLDER_COUNTS_FROM_REPLY
#define OFFER(r) (lease_end - now)
#define TAKEN(r) (now + offer[r])
#else
#define OFFER(r) (sent[r] + lease_end - now)    /* a ttl travels; the holder adds when it sent */
#define TAKEN(r) offer[r]
#endif

#ifdef FAULT_LEASE_USED_TWICE
#define ON_SAME_LEASE(r) mine[r] = mine[1 - r]; say(r, BEGIN); sent[r] = now
#else
#define ON_SAME_LEASE(r) skip           /* it computes: the lease is the first one's */
#endif

#ifdef FAULT_NO_TOKEN_CHECK
#define MATCHES(r) true
#else
#define MATCHES(r) (!other[r])
#endif

#ifdef FAULT_LATE_RESULT_USED
#define KEPT(r) true
#else
#define KEPT(r) STILL(r)
#endif

#ifdef FAULT_UNUSED_AFTER_READ
#define AFTER_READ UNUSED
#else
#define AFTER_READ CONSUMED
#endif

#ifdef WITHOUT_SMALL_DRIFT
#define SLOW 2
#else
#define SLOW SLACK                      /* a reader's clock is at most so far behind */
#endif
#define STILL(r) (now < valid[r] + SLOW)

#ifdef WITHOUT_DEAD_SILENCE
#define FAILS(r) false
#else
#define FAILS(r) (reads[r] <= dead_upto)        /* nobody answers for an engine that is gone */
#endif

/* ---- the owner */

#ifdef FAULT_VOID_FREES_AT_ONCE
#define ON_NEW_EPOCH if :: pin != 0 -> reuse() :: else fi
#else
#define ON_NEW_EPOCH skip               /* a reader may be reading: the hold runs out */
#endif
