"""What is true of every state of the database: each query finds what breaks it."""

from typing import Final

# Live: 1 held, 2 leased. A lease: 1 granted, 2 reading, or draining.
_OPEN: Final = "(l.state IN (1, 2) OR l.draining)"

INVARIANTS: Final[dict[str, str]] = {
    "states of ownerships": "SELECT ownership_id FROM ownerships WHERE state NOT BETWEEN 1 AND 6",
    "states of leases": "SELECT lease_id FROM leases WHERE state NOT BETWEEN 1 AND 7",
    "states of sessions": "SELECT session_id FROM sessions WHERE state NOT BETWEEN 1 AND 3",
    "outcomes of turns": "SELECT session_id FROM turns WHERE outcome NOT BETWEEN 0 AND 3",
    "states of workers": "SELECT worker_id FROM workers WHERE state NOT BETWEEN 1 AND 3"
    " OR role NOT BETWEEN 1 AND 3",
    "an open lease has its ownership": "SELECT l.lease_id FROM leases l"
    f" LEFT JOIN ownerships o ON o.ownership_id = l.ownership_id WHERE {_OPEN}"
    " AND (o.ownership_id IS NULL OR o.lease_id <> l.lease_id OR o.tenant_id <> l.tenant_id"
    " OR o.session_id <> l.session_id OR o.fencing_token <> l.fencing_token)",
    "a lease is of its owner's tenant": "SELECT l.lease_id FROM leases l"
    " JOIN ownerships o ON o.ownership_id = l.ownership_id"
    " WHERE o.tenant_id <> l.tenant_id OR l.fencing_token > o.fencing_token"
    " OR l.fencing_token < 1",
    "what is leased has its lease": "SELECT o.ownership_id FROM ownerships o"
    " LEFT JOIN leases l ON l.lease_id = o.lease_id"
    f" WHERE o.state = 2 AND (l.lease_id IS NULL OR NOT {_OPEN})",
    "a live lease is of something leased": "SELECT l.lease_id FROM leases l"
    " JOIN ownerships o ON o.ownership_id = l.ownership_id"
    " WHERE l.state IN (1, 2) AND o.state <> 2",
    "what is held has no lease": "SELECT ownership_id FROM ownerships"
    " WHERE state = 1 AND lease_id <> ''",
    "a lease ends before its hold": "SELECT l.lease_id FROM leases l"
    " JOIN ownerships o ON o.ownership_id = l.ownership_id"
    " WHERE l.state IN (1, 2) AND l.deadline_us > o.hold_deadline_us",
    "what has ended has a time": "SELECT ownership_id FROM ownerships"
    " WHERE (state IN (1, 2)) <> (ended_us = 0)",
    "leases that have ended have a time": "SELECT lease_id FROM leases"
    " WHERE (state IN (1, 2)) <> (ended_us = 0)",
    "only what was revoked or lost drains": "SELECT lease_id FROM leases"
    " WHERE draining AND state NOT IN (5, 7)",
    "an ownership has a payload": "SELECT o.ownership_id FROM ownerships o"
    " LEFT JOIN ownership_payloads p ON p.ownership_id = o.ownership_id"
    " WHERE o.state IN (1, 2) AND p.ownership_id IS NULL",
    "a payload has its ownership": "SELECT p.ownership_id FROM ownership_payloads p"
    " LEFT JOIN ownerships o ON o.ownership_id = p.ownership_id WHERE o.ownership_id IS NULL",
    "digests for each block": "SELECT o.ownership_id FROM ownerships o"
    " JOIN ownership_payloads p ON p.ownership_id = o.ownership_id"
    " WHERE length(p.digests) > 0"
    " AND length(p.digests) <> 16 * ((o.num_tokens + o.block_size - 1) / o.block_size)",
    "nothing is held for a session that has ended": "SELECT o.ownership_id FROM ownerships o"
    " JOIN ended_sessions e ON e.tenant_id = o.tenant_id AND e.session_id = o.session_id"
    " WHERE o.state = 1",
    "a remembered grant is of its tenant": "SELECT r.request_id FROM lease_requests r"
    " JOIN leases l ON l.lease_id = r.lease_id"
    # Those of workers, which name no tenant, have none.
    " WHERE r.tenant_id <> '' AND r.lease_id <> '' AND l.tenant_id <> r.tenant_id",
    "a remembered grant is one or a refusal": "SELECT request_id FROM lease_requests"
    " WHERE (lease_id = '') <> (refusal <> 0)",
    # It may outlive its ownership, until its own end.
    "a command names what is owned": "SELECT c.command_id FROM lease_commands c"
    " JOIN ownerships o ON o.ownership_id = c.ownership_id"
    " WHERE o.engine_id <> c.engine_id OR o.request_id <> c.request_id"
    " OR o.worker_id <> c.worker_id",
    "nothing is owned in an epoch to come": "SELECT o.ownership_id FROM ownerships o"
    " JOIN worker_epochs e ON e.worker_id = o.worker_id"
    " WHERE o.epoch > e.epoch OR (o.state IN (1, 2) AND o.epoch < e.epoch)",
    "a turn has its session": "SELECT t.request_id FROM turns t LEFT JOIN sessions s"
    " ON s.tenant_id = t.tenant_id AND s.session_id = t.session_id"
    " WHERE s.session_id IS NULL OR t.turn < 1 OR t.turn > s.turns",
    "a session has its turns": "SELECT s.session_id FROM sessions s WHERE s.turns <> ("
    "SELECT count(*) FROM turns t WHERE t.tenant_id = s.tenant_id"
    " AND t.session_id = s.session_id)",
    "a session's tokens are its turns'": "SELECT s.session_id FROM sessions s"
    " WHERE s.tokens_reused <> (SELECT coalesce(sum(t.tokens_reused), 0) FROM turns t"
    " WHERE t.tenant_id = s.tenant_id AND t.session_id = s.session_id)",
    "an open turn has no end": "SELECT request_id FROM turns"
    " WHERE (outcome = 0) <> (complete_us = 0)",
    "no count is negative": "SELECT request_id FROM turns WHERE prompt_tokens < 0"
    " OR completion_tokens < 0 OR tokens_reused < 0 OR open_turns < 0",
    "a history has its session": "SELECT h.session_id FROM session_history h LEFT JOIN sessions s"
    " ON s.tenant_id = h.tenant_id AND s.session_id = h.session_id"
    " WHERE s.session_id IS NULL OR h.turn > s.turns OR length(h.digest) <> 16",
    "a key has its tenant": "SELECT k.key_id FROM api_keys k"
    " LEFT JOIN tenants t ON t.tenant_id = k.tenant_id"
    " WHERE t.tenant_id IS NULL AND k.tenant_id <> ''",
    "keys are hashed": "SELECT key_id FROM api_keys"
    " WHERE length(secret_hash) <> 32 OR length(prefix) > 16",
}
