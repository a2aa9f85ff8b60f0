"""vLLM's NixlConnector with leases around every read.

    --kv-transfer-config '{"kv_connector": "NixlConnector",
                           "kv_connector_module_path": "kvplane_vllm.connector",
                           "kv_role": "kv_producer",
                           "kv_connector_extra_config": {
                               "bidirectional_kv_xfer": true,
                               "kvplane": {"control_plane": "10.0.0.1:7700",
                                           "url": "http://10.0.0.7:8100"}}}'

A thin facade: each hook lets `LeaseScheduler` act before or after vLLM's own. An error
of ours is logged and the request is computed; vLLM never sees it. The worker half is
vLLM's, unchanged.
"""

import logging
from collections.abc import Callable
from typing import Any

from kvplane.worker.agent import WorkerAgent
from vllm import __version__ as _vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlConnector as _NixlConnector,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvplane_vllm import compat
from kvplane_vllm.config import PluginConfig
from kvplane_vllm.identity import cuttable, identity_of
from kvplane_vllm.scheduler import LeaseScheduler

log = logging.getLogger("vllm.kvplane")


class NixlConnector(_NixlConnector):  # type: ignore[misc]
    """NixlConnector under kvplane. Named as vLLM's own, which it checks by name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for a wrong ``kvplane`` block."""
        transfer = vllm_config.kv_transfer_config
        config = PluginConfig.parse(transfer.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            # The scheduler reads it after it has made the connector.
            log.info("kvplane: kv_load_failure_policy is set to recompute")
            transfer.kv_load_failure_policy = "recompute"
        super().__init__(vllm_config, role, kv_cache_config)
        self._leases: LeaseScheduler | None = None
        self._agent: WorkerAgent | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start(vllm_config, kv_cache_config, config)

    def _start(self, vllm_config: Any, kv_cache_config: Any, config: PluginConfig) -> None:
        nixl = self.connector_scheduler
        layout = self.get_required_kvcache_layout(vllm_config) or "default"
        blocks = compat.num_blocks(kv_cache_config)
        identity = identity_of(vllm_config, nixl, config, _vllm_version, layout, blocks)
        self._agent = WorkerAgent(identity, config.agent())
        self._leases = LeaseScheduler(
            nixl,
            self._agent,
            cuttable=cuttable(vllm_config, kv_cache_config, FullAttentionSpec),
            tail_matters=any(
                isinstance(group.kv_cache_spec, MambaSpec)
                for group in kv_cache_config.kv_cache_groups
            ),
        )
        self._agent.start()
        # The agent says what it does where vLLM says what it does.
        ours, theirs = logging.getLogger("kvplane"), logging.getLogger("vllm")
        if not ours.handlers:
            ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
            ours.setLevel(theirs.level)

    def _guarded(self, hook: Callable[..., Any], *args: Any, request: Any = None) -> Any:
        try:
            return hook(*args)
        except Exception:
            log.exception("kvplane: an error of ours; the request is computed")
        try:
            if request is not None and self._leases is not None:
                self._leases.fail_closed(request)
        except Exception:
            log.exception("kvplane: an error of ours")
        return None

    # -- scheduler side -----------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """See vLLM."""
        compat.inherited(super(), "bind_kv_cache_manager", kv_cache_manager)
        if self._leases is not None:
            self._leases.manager = kv_cache_manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM. Before 0.32 this is all that a connector is given."""
        compat.inherited(super(), "bind_gpu_block_pool", gpu_block_pool)
        if self._leases is not None and self._leases.manager is None:
            self._leases.manager = compat.manager_of_caller()

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        if self._leases is None:
            return
        self._guarded(self._leases.adopt, request, request=request)
        compat.inherited(super(), "on_new_request", request)
        self._guarded(self._leases.ask, request, request=request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM."""
        assert self._leases is not None
        if not request.kv_transfer_params:
            return 0, False
        if not self._leases.knows(request):
            self.on_new_request(request)  # 0.21 does not announce requests
            if not self._leases.knows(request):
                return 0, False
        answer: tuple[int | None, bool] | None = self._guarded(
            self._leases.matched, request, num_computed_tokens, request=request
        )
        return answer if answer is not None else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        assert self._leases is not None
        self._guarded(self._leases.after_alloc, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """See vLLM."""
        assert self._leases is not None
        for act in self._leases.before_meta():
            self._guarded(act)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        assert self._leases is not None
        self._guarded(self._leases.outputs, connector_output)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        assert self._leases is not None
        self._guarded(self._leases.before_finish, request, request=request)
        pinned, params = super().request_finished_all_groups(request, block_ids)
        self._guarded(self._leases.after_finish, request, pinned, params)
        return pinned, params

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """See vLLM. True keeps an idle engine stepping."""
        own = self._leases is not None and self._leases.busy
        return own or bool(compat.inherited(super(), "has_pending_push_work"))

    def shutdown(self) -> None:
        """See vLLM."""
        if self._agent is not None:
            self._agent.close()
        super().shutdown()


KvplaneConnector = NixlConnector
