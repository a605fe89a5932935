"""The command line of engine.py: options, prompts, what a person sees, and the files that are written."""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import engine as engine_module
from engine import (
    ACCEPTANCE_RULES,
    BUDGET_RULES,
    DEFAULT_MODEL,
    DRAFT_SAMPLE_METHODS,
    DTYPES,
    Completion,
    Engine,
    PromptTooLong,
    SamplingParams,
)
from model import Config
from prompts import Prompt, encode_prompt, load_tokenizer
from weights import fetch

DEFAULT_PROMPT = 'def read_config(path):\n    """'


class Parser(argparse.ArgumentParser):
    def error(self, message: str):  # one line, no usage
        raise SystemExit(fail(message))


def fail(message: object) -> int:
    print(f"engine.py: {message}", file=sys.stderr)
    return 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=engine_module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory or hub id (default: the embedded checkpoint)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    parser.add_argument(
        "--prompts-file", metavar="FILE", help='one per line: text, or JSON with "prompt" or "prompt_token_ids"'
    )
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says to the assistant")
    parser.add_argument("--thinking", action="store_true", help="with --chat: the assistant reasons first")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K best tokens (default: all)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="... from the best with mass P (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--stop", nargs="+", default=[], metavar="TEXT", help="end the text before any of these strings"
    )
    parser.add_argument("--logprobs", type=int, metavar="N", help="of every token and the N best, for --output-json")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="default: block size; 0: no drafter at all"
    )
    parser.add_argument("--adaptive-verification", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--draft-sample-method", choices=DRAFT_SAMPLE_METHODS, default="probabilistic")
    parser.add_argument("--acceptance", choices=ACCEPTANCE_RULES, default="rejection")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="R")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="T")
    parser.add_argument("--max-model-len", type=int, metavar="L", help="default: what the longest request needs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="takes a minute or two (default: on CUDA only)"
    )
    parser.add_argument("--budget-rule", choices=BUDGET_RULES, default="auto")
    parser.add_argument("--cost-table", metavar="FILE", help="a table saved by profile_costs.py, instead of measuring")
    parser.add_argument("--profile-context-len", type=int, default=8192, metavar="N")
    parser.add_argument(
        "--output-json", metavar="FILE", help="one object per request, then the statistics; - for standard output"
    )
    parser.add_argument("--trace", metavar="FILE", help="one JSON object per step")
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="one prompt, on a terminal: accepted drafts green, rejected struck out",
    )
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = list(args.prompt or [])
    if args.prompts_file:
        try:
            lines = Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {args.prompts_file}: {error}") from None
        for number, line in enumerate(lines, start=1):
            if not line.startswith("{"):
                prompts.append(line)
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"--prompts-file {args.prompts_file}, line {number}: not JSON: {error}") from None
            match entry:
                case {"prompt_token_ids": list(prompt)} | {"messages": list(prompt)} | {"prompt": str(prompt)}:
                    prompts.append(prompt)
                case _:
                    where = f"--prompts-file {args.prompts_file}, line {number}"
                    raise ValueError(f'{where}: needs "prompt", a text, or "prompt_token_ids" or "messages", a list')
        if not prompts:
            raise ValueError(f"--prompts-file {args.prompts_file}: no prompts in it")
    prompts = prompts or [DEFAULT_PROMPT]
    if args.thinking and not args.chat:
        raise ValueError("--thinking: only with --chat")
    return [[{"role": "user", "content": p}] if args.chat and isinstance(p, str) else p for p in prompts]


def needed_model_len(args: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Positions that the longest request can come to, rounded up to 128s, no more than the checkpoint allows."""
    directory = fetch(args.model, args.revision, weights=False)
    config, tokenizer = Config.load(directory), load_tokenizer(directory)
    lengths = [len(encode_prompt(tokenizer, config.bos_token_id, prompt, args.thinking)[1]) for prompt in prompts]
    return min(-(max(lengths) + args.max_tokens) // 128 * -128, config.max_position_embeddings)


ACCEPTED, REJECTED, PLAIN = "\033[32m", "\033[9;31m", "\033[0m"  # green; struck through, red


class Display:
    """What a person sees: with one request its text as it is written, with several a progress bar of tokens.

    With --show-drafts, on a terminal that may have colours, accepted drafts are green, and rejected ones stay struck
    through behind the text until the next step has been computed.
    """

    def __init__(self, engine: Engine, prompts: list[Prompt], args: argparse.Namespace):
        self.engine, self.tokens, self.shown = engine, [], 0
        self.held_back = max(map(len, args.stop), default=1) - 1  # characters that may turn out to open a stop string
        self.stream = len(prompts) == 1 and args.output_json != "-"
        self.colours = args.show_drafts and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.bar = None if self.stream else tqdm(total=len(prompts) * args.max_tokens, unit="token", leave=False)
        match prompts[0]:
            case str(text):
                self.opening = text
            case [int(_), *_] as token_ids:
                self.opening = engine.decode(token_ids)
            case _:  # a conversation: its answer is what is wanted
                self.opening = ""
        if self.stream:
            print(self.opening, end="", flush=True)

    def update(self, record: dict) -> None:
        for request in record["requests"]:
            if not self.stream:
                self.bar.update(len(request["emitted"]))
                continue
            if self.colours:
                print("\033[K", end="")  # what was rejected stands between the cursor and the end of the line
            for i, token in enumerate(request["emitted"]):
                self.tokens.append(token)
                text = self.engine.decode(self.tokens)
                if not text.endswith("\ufffd"):  # wait for the rest of a character that is split over tokens
                    end = max(len(text) - self.held_back, self.shown)
                    self.print_piece(text[self.shown : end], ACCEPTED if i < request["accepted"] else "")
                    self.shown = end
            if self.colours:
                self.print_rejected(request["drafts"][request["accepted"] : request["admitted"]])

    def print_piece(self, text: str, style: str) -> None:
        print(style + text + PLAIN if self.colours and style and text else text, end="", flush=True)

    def print_rejected(self, drafts: list[int]) -> None:
        """Behind the text, as far as the line has room, with the cursor left where the text ends."""
        width = shutil.get_terminal_size().columns
        line = (self.opening + self.engine.decode(self.tokens)[: self.shown]).rsplit("\n", 1)[-1].expandtabs(8)
        text = self.engine.decode(drafts).replace("\n", "\u21b5").replace("\t", " ")[: width - len(line) % width - 1]
        if text:
            print(f"{REJECTED}{text}{PLAIN}\033[{len(text)}D", end="", flush=True)

    def finish(self, completions: list[Completion], quiet: bool) -> None:
        if self.stream:
            rest = "\033[K" if self.colours else ""
            rest += completions[0].text[self.shown :] + (" [cut]" if completions[0].finish_reason == "cut" else "")
            print(rest)
            return
        self.bar.close()
        for c in () if quiet else completions:
            print(f"--- request {c.index}, {len(c.token_ids)} tokens, {c.finish_reason}")
            print((c.prompt or "") + c.text)


class LineFile:
    """JSON lines, each handed to the system whole: whatever stops this process, complete lines are what is there."""

    def __init__(self, path: str):
        self.name, self.fd = path, 1
        if path != "-":
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, entry: dict) -> None:
        """Raises OSError naming the file; a line of which only a part could be written is taken back."""
        line, done = (json.dumps(entry) + "\n").encode(), 0
        try:
            while done < len(line):
                done += os.write(self.fd, line[done:])
        except OSError as error:
            if done and self.fd != 1:
                os.ftruncate(self.fd, os.lseek(self.fd, -done, os.SEEK_CUR))
            raise OSError(error.errno, error.strerror, self.name) from None


def summary(stats: dict) -> str:
    """The statistics as a person reads them."""
    seconds = sum(stats["time_s"].values())
    shares = ", ".join(f"{name} {s / seconds:.0%}" for name, s in stats["time_s"].items())
    positions = " ".join("-" if a is None else f"{a:.2f}" for a in stats["acceptance_by_position"]) or "no drafts"
    return (
        f"{stats['output_tokens']} tokens in {stats['wall_s']:.2f} s, {stats['tokens_per_s']:.1f} tokens/s, "
        f"{stats['steps']} steps\n"
        f"mean accepted length     {stats['mean_accepted_length']:.2f} tokens per request and step, bonus token included\n"
        f"mean budget per request  {stats['mean_budget_per_request']:.2f} drafts verified\n"
        f"acceptance by position   {positions}\n"
        f"step time                {shares}"
    )


def join_processes(device: str) -> int:
    """Under torchrun, which sets WORLD_SIZE and the rest, become one of its processes. Returns this one's rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.get_rank()


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def terminate(*_) -> None:
    raise Terminated


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if something broke on the way; 2 for input that cannot work; 130, 143 if stopped."""
    args = parse_args(argv)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return run(args, join_processes(args.device))
    except KeyboardInterrupt as stop:  # before there was anything to show
        return stopped(stop)
    except OSError as error:  # while writing
        print(f"engine.py: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        if not error.filename:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails once more when it exits
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
        if dist.is_initialized():
            dist.destroy_process_group()


def stopped(stop: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def run(args: argparse.Namespace, rank: int) -> int:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if rank > 0:  # the first process speaks for all
        args.trace = args.output_json = None
    try:
        params = SamplingParams(
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
            top_k=args.top_k,
            top_p=args.top_p,
            stop=tuple(args.stop),
            logprobs=args.logprobs,
        )
        prompts = read_prompts(args)
        output, trace = (LineFile(path) if path else None for path in (args.output_json, args.trace))
        if args.max_model_len is None:
            args.max_model_len = needed_model_len(args, prompts)
        if not 1 <= args.max_num_seqs <= args.max_num_batched_tokens:
            allowed = f"1 to --max-num-batched-tokens ({args.max_num_batched_tokens})"
            raise ValueError(f"--max-num-seqs {args.max_num_seqs}: allowed: {allowed}")
        engine = Engine(
            args.model,
            args.num_speculative_tokens,
            args.adaptive_verification,
            min(args.max_num_seqs, len(prompts)),
            args.max_num_batched_tokens,
            args.max_model_len,
            args.device,
            args.dtype,
            args.compile,
            args.profile_context_len,
            args.budget_rule,
            args.draft_sample_method,
            args.acceptance,
            args.cost_table,
            revision=args.revision,
        )
        fitting, status = [], 0  # all prompts are checked before the first step
        for i, prompt in enumerate(prompts):
            try:
                engine.make_request(i, prompt, params, args.thinking)
                fitting.append(i)
            except PromptTooLong as error:
                status = fail(error) if rank == 0 else 2
        if not fitting:
            return status
    except (ValueError, OSError) as error:
        return fail(error) if rank == 0 else 2
    prompts = [prompts[i] for i in fitting]
    display = Display(engine, prompts, args) if rank == 0 else None

    def on_step(record: dict) -> None:
        if display:
            display.update(record)
        if trace:
            trace.write(record)

    try:
        engine.generate(prompts, params, on_step, thinking=args.thinking, indices=fitting)
    except KeyboardInterrupt as stop:
        status = stopped(stop)
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        print(f"engine.py: another process has gone: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if display:
        completions, stats = engine.completions(), engine.stats.report()
        display.finish(completions, quiet=args.output_json == "-")
        print(summary(stats), file=sys.stderr)
        if output:
            for completion in completions:
                fields = asdict(completion).items()
                output.write({key: value for key, value in fields if value is not None or key == "prompt"})
            output.write({"stats": stats})
        for c in completions:
            if c.error:
                status = 1
                print(f"engine.py: request {c.index}: {c.error}", file=sys.stderr)
    return status
