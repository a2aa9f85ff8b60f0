"""Workers as values."""

from kvplane.routing.domain import Compatibility, Load, Profile, Role, State, Worker

SAME = Compatibility("m", "r", 16, "NHD", "float32", "1")


def worker(
    worker_id: str,
    role: Role = Role.DECODE,
    state: State = State.READY,
    compatibility: Compatibility = SAME,
    models: tuple[str, ...] = ("m",),
    running: int = 0,
    **profile,
) -> Worker:
    values = {
        "url": "http://h:1",
        "kv_host": "h",
        "kv_port": 1,
        "engine_id": "e",
        "data_parallel_rank": None,
        "bidirectional": True,
        "managed": True,
        "max_model_len": 0,
        "recompute_threshold": 64,
        **profile,
    }
    mine = Profile(
        worker_id=worker_id,
        role=role,
        compatibility=compatibility,
        served_models=models,
        **values,
    )
    return Worker(mine, "i", 1, state, Load(running=running), 0, 1, 1)
