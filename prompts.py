"""From what a user gives to token ids: texts, and conversations in the chat format of DeepSeek-V4.

Source of the format: encoding/README.md of the release. It is
begin-of-sentence, system text, then turns: user marker and text, assistant marker and answer, end-of-sentence. The
assistant's turn opens with a think marker: <think> if it is to reason first, </think> if it is to answer at once.
"""

from pathlib import Path

from tokenizers import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or messages


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises ValueError naming the file if it is missing or not a tokenizer."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001, the library raises nothing narrower
        raise ValueError(f"{path}: {error}") from None


def encode_prompt(tokenizer: Tokenizer, bos: int, prompt: Prompt, thinking: bool) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one (the last message of a conversation), and its token ids."""
    if isinstance(prompt, str):
        return prompt, [bos, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    if prompt and isinstance(prompt[0], dict):
        ids = encode_chat(tokenizer, prompt, thinking)
        return prompt[-1]["content"], ids
    return None, list(prompt)


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], thinking: bool = False) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to speak.

    messages: [{"role": "system", "user" or "assistant", "content": text}, ...]. Markers are the tokenizer's own special
    tokens; the same characters inside a text stay plain text. Raises ValueError for a tokenizer without them, an
    unknown role, or a conversation that does not end with the user.
    """

    def marker(name: str) -> int:
        token = tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"chat: the tokenizer has no token {name!r}")
        return token

    def text(content: str) -> list[int]:
        before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
        try:
            return tokenizer.encode(content, add_special_tokens=False).ids
        finally:
            tokenizer.encode_special_tokens = before

    ids = [marker(BOS)]
    for i, message in enumerate(messages):
        match message:
            case {"role": "system", "content": str(content)}:
                ids += text(content)
            case {"role": "user", "content": str(content)}:
                ids += [marker(USER), *text(content)]
            case {"role": "assistant", "content": str(content)}:
                ids += [marker(ASSISTANT), marker(END_THINK), *text(content), marker(EOS)]
            case _:
                raise ValueError(f'chat: message {i} needs "role": system, user or assistant, and "content": a text')
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("chat: the last message must be the user's")
    return [*ids, marker(ASSISTANT), marker(THINK if thinking else END_THINK)]
