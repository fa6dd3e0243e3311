"""A scheduler of your own: continuous batching and preemption by recomputation in about 60 lines."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from paged_decoder import PagedDecoder

from octavo.errors import OutOfBlocksError
from octavo.kv import Extension


@dataclass(slots=True)
class Job:
    """A prompt and what was generated so far."""

    name: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)


class Scheduler:
    """First come, first served; when blocks run out, the youngest running job gives its blocks up."""

    def __init__(self, model: PagedDecoder, jobs: list[Job], max_running: int) -> None:
        self.model = model
        self.waiting = deque(jobs)
        self.running: list[Job] = []
        self.max_running = max_running
        self.num_preemptions = 0

    def run(self) -> None:
        """Run all jobs to their ends, greedily."""
        while self.waiting or self.running:
            step = self.schedule()
            tokens = self.model.run(step).argmax(dim=1).tolist()
            by_name = dict(zip(step, tokens, strict=True))
            for job in list(self.running):
                job.output.append(by_name[job.name])
                if len(job.output) == job.max_tokens:
                    self.running.remove(job)
                    self.model.sequences.free(job.name)

    def schedule(self) -> dict[Hashable, Extension]:
        """Return the next step: a token of each running job, oldest first, and prompts while blocks last."""
        step: dict[Hashable, Extension] = {}
        for job in list(self.running):
            while job in self.running and job.name not in step:
                try:
                    step[job.name] = self.model.sequences.update(job.name, job.output[-1:])
                except OutOfBlocksError:
                    if len(self.running) == 1:
                        raise  # It has all blocks and needs more: no order of jobs would help.
                    self.preempt()
        while self.waiting and len(self.running) < self.max_running:
            job = self.waiting[0]
            try:
                step[job.name] = self.model.sequences.alloc(job.name, job.prompt + job.output)
            except OutOfBlocksError:
                if not self.running:
                    raise
                break
            self.running.append(self.waiting.popleft())
        return step

    def preempt(self) -> None:
        """Free the youngest job, which is not in the step yet; it is computed again, cached blocks aside."""
        job = self.running.pop()
        self.model.sequences.free(job.name)
        self.waiting.appendleft(job)
        self.num_preemptions += 1


def main() -> None:
    model = PagedDecoder(num_blocks=16, block_size=4)
    texts = ["The sun is", "A poem about the sea:", "One, two, three,", "Water boils at", "Once upon a time"]
    jobs = [Job(text, model.tokenizer.encode(text), max_tokens=12) for text in texts]
    scheduler = Scheduler(model, jobs, max_running=4)
    scheduler.run()
    for job in jobs:
        print(f"{job.name!r} -> {model.tokenizer.decode(job.output)!r}")
    stats = model.sequences.stats()
    print(f"{scheduler.num_preemptions} preemptions; {stats.prefix_hit_tokens} tokens from the prefix cache")
    print(f"{stats.referenced_bytes} bytes in use, {stats.cached_bytes} cached, {stats.free_bytes} free")


if __name__ == "__main__":
    main()
