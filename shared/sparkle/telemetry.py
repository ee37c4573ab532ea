"""Every metric, declared once: name, unit, kind and meaning; `sparkle-ctl status` and the docs are made from it.

Counters only grow; gauges say what is true now; ratios are derived by the reader. A daemon reports its metrics by these
names in `Status.metrics`; `check` refuses names that are not declared here. A metric with labels, such as
`predicted_bytes{source,outcome}`, has a value for each combination of theirs: maps in maps, the first label outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    role: str
    name: str
    kind: str  # counter, gauge or text
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return self.name + ("{" + ",".join(self.labels) + "}" if self.labels else "")


_TABLE = """
prefetch model_name             text     -       name of the store served
prefetch pool_bytes             gauge    bytes   experts that the slots in force can hold
prefetch pool_target_bytes      gauge    bytes   the same, as asked for: the governor may keep the pool smaller
prefetch experts_bytes          gauge    bytes   all expert records of the main model
prefetch n_regions              gauge    items   regions allocated
prefetch n_slots                gauge    items   slots in force
prefetch n_experts              gauge    items   experts in the store's layers that clients use
prefetch slots_used             gauge    items   slots with a readable expert
prefetch slots_loading          gauge    items   slots being read into
prefetch slots_held             gauge    items   slots marked in use by a client
prefetch slots_pinned           gauge    items   slots that eviction passes over
prefetch slots_side             gauge    items   slots filled in the background and not used yet (the side region)
prefetch n_clients              gauge    items   pool clients attached
prefetch hits_resident          counter  items   experts found in the pool by the client itself, no message sent
prefetch hits_in_flight         counter  items   experts that arrived between the client's look-up and its request
prefetch hits_late              counter  items   experts whose background read was still under way when asked for
prefetch misses                 counter  items   experts read because a client asked
prefetch regrets                counter  items   of these, evicted not more than 8 tokens ago
prefetch tokens                 counter  tokens  tokens whose experts were looked up, prompts included
prefetch fetches                counter  items   FetchExperts served
prefetch fetches_queued         counter  items   FetchExperts that had to wait for slots in use
prefetch fetches_failed         counter  items   FetchExperts that ended in an error
prefetch bytes_read             counter  bytes   bytes read from the store
prefetch bytes_read_demand      counter  bytes   of these, because a client asked
prefetch bytes_read_background  counter  bytes   of these, into the side region
prefetch predicted_bytes{source,outcome} counter bytes read ahead for a predictor or fill: issued, used, late or wasted
prefetch read_busy_s            counter  s       time with at least one read under way
prefetch read_p50_ms            gauge    ms      median time of the last 512 demand reads
prefetch read_p99_ms            gauge    ms      99th percentile of the last 512 demand reads
prefetch reads_retried          counter  items   reads tried again after an I/O error or a wrong checksum
prefetch records_quarantined    counter  items   records that could not be read correctly; requests for them fail
prefetch checksums_verified     counter  items   records whose checksum was verified
prefetch evictions              counter  items   experts dropped for others
prefetch judged_bytes_read      gauge    bytes   experts that decoding found missing in the last minutes judged
prefetch judged_bytes_belady    gauge    bytes   the same for a policy that knows the future; the ratio is R_B
prefetch judged_tokens          gauge    tokens  tokens decoded meanwhile whose time is known
prefetch judged_decode_s        gauge    s       time that those tokens took
prefetch judged_stall_s         gauge    s       of this, without their experts
prefetch policy                 text     -       who decides which expert leaves the pool first
prefetch profile_tokens         counter  tokens  tokens in the usage profile, those of former runs included
prefetch prefetch_active        text     -       whose forecasts are read now, or off
prefetch prefetch_reason        text     -       why: what the last trial showed; while one runs, of what
prefetch prefetch_trials        counter  items   trials of forecasts against none
prefetch is_recording           gauge    items   1 while a trace is recorded
prefetch governor_reason        text     -       why the pool has its size
prefetch memory_available_bytes gauge    bytes   memory left before the tightest limit binds
prefetch memory_pressure_frac   gauge    ratio   share of the last 10 s in which some task waited for memory
prefetch pool_shrinks           counter  items   times that the governor made the pool smaller
prefetch pool_grows             counter  items   times that the governor made the pool larger
prefetch unplaced_experts       counter  items   experts that a request needed and that got no correct slot; 0 in health
prefetch io_engine              text     -       io_uring (registered buffers or not) or threads
prefetch direct_io              text     -       on: reads bypass the page cache; off with the reason
prefetch read_depth             gauge    items   reads under way at once
prefetch disk_bytes_per_s       gauge    bytes/s bandwidth of the disk at this depth, measured at start
compute  device                 text     -       MLX device and dtype in use
compute  model_type             text     -       mlx-lm model class
compute  resident_bytes         gauge    bytes   weights kept in memory
compute  active_bytes           gauge    bytes   memory that MLX has allocated
compute  context_tokens         gauge    tokens  longest prompt plus answer
compute  prefill_rows           gauge    tokens  prompt tokens per prefill step
compute  requests               counter  items   Generate requests accepted
compute  requests_finished      counter  items   of these, ended with Finished
compute  requests_failed        counter  items   of these, ended with Error
compute  n_active               gauge    items   requests that generate now
compute  n_queued               gauge    items   requests that wait
compute  prompt_tokens          counter  tokens  prompt tokens prefilled
compute  output_tokens          counter  tokens  tokens returned
compute  steps                  counter  items   forward passes of the main model
compute  decode_tps             gauge    tok/s   output tokens per second over the last 10 s of decoding
compute  prefill_tps            gauge    tok/s   prompt tokens per second over the last 10 s of prefill
compute  ttft_p50_ms            gauge    ms      median time to first token of the last 64 requests
compute  stall_s                counter  s       time the model waited for experts
compute  unplaced_experts       counter  items   experts that a step needed and could not get; its request failed
front    n_clients              gauge    items   clients heard from in the last minute
front    n_sessions             gauge    items   sessions kept
front    n_busy                 gauge    items   answers being generated
front    chats                  counter  items   Chat requests accepted
front    chats_finished         counter  items   of these, ended with ChatDone
front    chats_failed           counter  items   of these, ended with Error
front    chats_cancelled        counter  items   answers ended because the client cancelled or went away
front    bad_messages           counter  items   messages refused as malformed
front    compute_state          text     -       state of the compute daemon as the front daemon sees it
"""


def _parse() -> dict[tuple[str, str], Metric]:
    found = {}
    for line in _TABLE.strip().splitlines():
        role, full_name, kind, unit, meaning = line.split(None, 4)
        name, _, inner = full_name.removesuffix("}").partition("{")
        labels = tuple(inner.split(",")) if inner else ()
        found[role, name] = Metric(role, name, kind, unit, meaning, labels)
    return found


METRICS: Mapping[tuple[str, str], Metric] = _parse()


def check(role: str, metrics: Mapping[str, Any]) -> None:
    """Raise KeyError for a metric that is not declared; daemons call it in tests and at their first status."""
    for name in metrics:
        if (role, name) not in METRICS:
            raise KeyError(f"metric '{name}' of the {role} daemon is not declared in sparkle.telemetry")
