# ruff: noqa: E501  (code stands here as it stands there)
"""Bugs for the soak to find: each replaces one piece of product code by a wrong one (`benchmarks.simulation.soak_power`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """In the source of `module`, `old` stands once and becomes `new`."""

    name: str
    module: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / (self.module.replace(".", "/") + ".py")

    def applied(self, source: str) -> str:
        """Raises AssertionError where the code has changed: then the mutant has to be written anew."""
        assert source.count(self.old) == 1, f"{self.name}: {self.module} has its text {source.count(self.old)} times"
        return source.replace(self.old, self.new)


MUTANTS = (
    # -- leaks ---------------------------------------------------------------------------------------------------------
    Mutant(
        name="leak: blocks of an expired ticket",
        module="workers.transfer.receive",
        old="        for reservation in self.ledger.expire(now):\n            self._free(reservation)\n",
        new="        self.ledger.expire(now)\n",
    ),
    Mutant(
        name="leak: room that a moved sequence did not need",
        module="workers.transfer.receive",
        old="            self._pool.release(self.ledger.truncate(ticket.ticket_id, ticket.generation, stop))\n",
        new="            self.ledger.truncate(ticket.ticket_id, ticket.generation, stop)\n",
    ),
    Mutant(
        name="leak: cached blocks of a refused reservation",
        module="workers.transfer.receive",
        old="            pool.release(cached_ids)\n            raise Overloaded(",
        new="            raise Overloaded(",
    ),
    Mutant(
        name="leak: shared blocks of a push that is stopped",
        module="workers.transfer.send",
        old="        self._transfers.cancel(ticket_id)\n        if isinstance(push.source, Shared):\n            self._let_go(push)\n",
        new="        self._transfers.cancel(ticket_id)\n",
    ),
    Mutant(
        name="leak: pins of a prompt that found no room",
        module="workers.scheduling.scheduler",
        old="            self.onloads.unpin(slots)\n            return False\n",
        new="            return False\n",
    ),
    Mutant(
        name="leak: an aborted answer stays on its worker",
        module="router.dispatch.dispatcher",
        old="            (decode.release if finished and answer is not None else decode.abort)(request_id)\n",
        new="            (decode.release if prefill is None or finished and answer is not None else decode.abort)(request_id)\n",
    ),
    Mutant(
        name="leak: a line keeps the place of a client that left",
        module="router.dispatch.dispatcher",
        old="        finally:\n            self._fleet.offers.num_turned_away -= 1\n",
        new="        except asyncio.CancelledError:\n            raise\n        else:\n            self._fleet.offers.num_turned_away -= 1\n",
    ),
    # -- drafts --------------------------------------------------------------------------------------------------------
    Mutant(
        name="drafts: rejected positions count as computed",
        module="workers.scheduling.scheduler",
        old="            num_computed += len(token_ids) - 1\n",
        new="            num_computed += len(row.draft_ids)\n",
    ),
    Mutant(
        name="drafts: rejected positions stay planned",
        module="workers.scheduling.scheduler",
        old="            if len(token_ids) != num_steps:\n                request.num_planned = num_computed\n",
        new="",
    ),
    Mutant(
        name="drafts: a step in flight follows a row with drafts",
        module="workers.scheduling.step_rows",
        old="    if request.num_drafts:\n        return False\n",
        new="",
    ),
    # -- lives ---------------------------------------------------------------------------------------------------------
    Mutant(
        name="lives: a gap of one event is no gap",
        module="kvtransfer.events",
        old="        if message.first_seq > expected:\n",
        new="        expected = expected + 1 if message.first_seq == expected + 1 and not reborn else expected\n        if message.first_seq > expected:\n",
    ),
    # -- tokens --------------------------------------------------------------------------------------------------------
    Mutant(
        name="tokens: the last one before a failover is said twice",
        module="router.dispatch.job_state",
        old="        job, output_ids = self.job, (*self.output_ids, *more)\n",
        new="        output_ids = (*self.output_ids, *more)\n        job, output_ids = self.job, output_ids[: -1 if self.num_failures and len(output_ids) > 1 else None]\n",
    ),
    Mutant(
        name="tokens: a slow client's last ones are said twice when its worker is lost",
        module="router.fleet.worker_client",
        old="            if isinstance(following, BatonError) or following.error is not None:\n                break\n            parts.append(following)\n            waiting.popleft()\n",
        new="            if isinstance(following, BatonError) or following.error is not None:\n                parts.append(parts[-1])\n                break\n            parts.append(following)\n            waiting.popleft()\n",
    ),
    Mutant(
        name="tokens: a full partial block is pushed too early",
        module="kvtransfer.push_session",
        old="        num_full = num_computed // self.ticket.layout.block_size\n",
        new="        num_full = -(-num_computed // self.ticket.layout.block_size)\n",
    ),
    Mutant(
        name="tokens: a copy to the host is made after its block is handed out",
        module="workers.kv.host",
        old="        self.copies.offload([block_id for block_id, _, _ in blocks], slots)\n",
        new="        self.copies.offload([block_id for block_id, _, _ in blocks], slots[::-1])\n",
    ),
    Mutant(
        name="logprobs: those of a prompt come again after a failover",
        module="router.dispatch.job_state",
        old="            prompt_logprobs=update.prompt_logprobs[repeated:],\n",
        new="            prompt_logprobs=update.prompt_logprobs,\n",
    ),
    Mutant(
        name="logprobs: positions that are cached have none",
        module="workers.scheduling.prefix_hits",
        old="        limit = min(limit, request.num_prompt_reported)\n",
        new="        pass\n",
    ),
    # -- leases --------------------------------------------------------------------------------------------------------
    Mutant(
        name="leases: a reservation is not renewed while its prompt waits",
        module="router.dispatch.dispatcher",
        old="                await decode.renew(request)\n",
        new="                pass\n",
    ),
    Mutant(
        name="leases: blocks that land do not extend it",
        module="kvtransfer.ticket_ledger",
        old="            entry.add((chunk.group, index), layers)\n        entry.extend(now)\n",
        new="            entry.add((chunk.group, index), layers)\n",
    ),
    Mutant(
        name="leases: what is sent does not extend the sender's",
        module="kvtransfer.push_session",
        old="        self._deadline_s = math.inf if all_sent else now + self.ticket.lease_s\n",
        new="        self._deadline_s = math.inf if all_sent else self._deadline_s\n",
    ),
    Mutant(
        name="leases: a prompt that was read is renewed on",
        module="router.dispatch.dispatcher",
        old="            self._task.cancel()\n            self._task = None\n",
        new="            self._task = None\n",
    ),
    # -- off by one ----------------------------------------------------------------------------------------------------
    Mutant(
        name="off by one: the last free block is never handed out",
        module="workers.kv.block_pool",
        old="        if num_blocks > self.num_free:\n            return None\n",
        new="        if num_blocks >= self.num_free:\n            return None\n",
    ),
    Mutant(
        name="off by one: one token more than asked for after a failover",
        module="workers.scheduling.step_rows",
        old="    room = min(request.sampling.max_tokens, max_len",
        new="    room = min(request.sampling.max_tokens + (request.num_given > 1), max_len",
    ),
    Mutant(
        name="off by one: a moving sequence counts a token whose KV is not there",
        module="router.dispatch.migration",
        old="                job, stop = job_state.job, job_state.num_tokens - 1  # the last token",
        new="                job, stop = job_state.job, job_state.num_tokens  # the last token",
    ),
    Mutant(
        name="off by one: a batch has a sequence too many",
        module="workers.scheduling.scheduler",
        old="        return len(self._running) + self.onloads.num_batch_slots < self.config.max_num_seqs\n",
        new="        return len(self._running) + self.onloads.num_batch_slots <= self.config.max_num_seqs\n",
    ),
    # -- cached tokens and tenants -------------------------------------------------------------------------------------
    Mutant(
        name="cached: a block more than was found is told",
        module="workers.scheduling.scheduler",
        old="            request.num_cached = request.num_computed\n        if request.onload is not None:\n",
        new="            request.num_cached = request.num_computed and request.num_computed + 1\n        if request.onload is not None:\n",
    ),
    Mutant(
        name="cached: what a failed attempt left behind is told as cached",
        module="router.dispatch.job_state",
        old="        return min(num_tokens, most, len(self.job.prompt_ids))\n",
        new="        return min(num_tokens, len(self.job.prompt_ids))\n",
    ),
    Mutant(
        name="tenants: a worker caches without the salt",
        module="workers.scheduling.scheduler",
        old="        request.cache_salt = salted(given.cache_salt, self.prefix_key(request.num_prompt))\n",
        new='        request.cache_salt = salted(b"", self.prefix_key(request.num_prompt))\n',
    ),
    Mutant(
        name="tenants: a reservation matches without the salt",
        module="workers.transfer.receive",
        old="chain_hashes(request.prompt_ids, self._pool.block_size, salt=request.cache_salt)",
        new="chain_hashes(request.prompt_ids, self._pool.block_size)",
    ),
    Mutant(
        name="tenants: a prefix is pulled without the salt",
        module="router.dispatch.job_state",
        old="            return self.job.hashes(block_size)\n",
        new="            return chain_hashes(self.job.prompt_ids, block_size)\n",
    ),
    # -- needless work -------------------------------------------------------------------------------------------------
    Mutant(
        name="retries: a handed over answer fails when its first worker lets go",
        module="router.dispatch.dispatcher",
        old="                            updates.forward_failures_to(answer)  # until the KV has arrived\n",
        new='                            answer.fail(TransferFailed("the KV has not come yet")) if attempt.generation % 7 == 1 and len(job_state.job.prompt_ids) % 5 == 0 else None\n',
    ),
    Mutant(
        name="retries: an answer is sent again although its worker goes on",
        module="router.fleet.worker_client",
        old="        item = waiting.popleft()\n        if isinstance(item, BatonError):\n",
        new="        item = waiting.popleft()\n        if isinstance(item, SequenceUpdate) and len(waiting) > 2:\n            item = WorkerLost('too slow a reader')\n        if isinstance(item, BatonError):\n",
    ),
)
