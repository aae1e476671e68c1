"""Text to token ids and back: tokenizer.json, or the vocabulary inside a GGUF file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from svflow.models.checkpoint import TOKENIZER_PATTERNS, find
from svflow.models.gguf_metadata import GgufFile, read_gguf

# How a byte-level vocabulary's text is split before its merges apply, by `tokenizer.ggml.pre`
# (the tokenizer.json of the models named; llama.cpp, src/llama-vocab.cpp). None: GPT-2's own rule.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": None,
    "smollm": r"\p{N}",  # each digit alone, then GPT-2's rule on the rest
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    """Encodes text as ids and decodes ids as text, adding nothing that was not asked for.

    Attributes:
        vocab_size: one more than the largest id.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        # A tokenizer.json may carry a length to cut or to pad to.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        decoder = backend.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 (T,). No BOS or EOS is added; special tokens that are written
        out in the text are recognised."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (T,), special tokens included. Raises ValueError for an unknown id."""
        self.tokens(ids)
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json into a folder, made if need be, such as that of `sv.save`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._backend.save(str(Path(folder) / "tokenizer.json"))

    def tokens(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """One readable piece per id (T,), for tables: its text, or its bytes as <0xE2> where they
        are not whole characters. Raises ValueError for an unknown id."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"ids are integers (T,), not {ids.dtype} {ids.shape}")
        pieces = []
        for id_ in ids.tolist():
            token = self._backend.id_to_token(id_) if 0 <= id_ < self.vocab_size else None
            if token is None:
                raise ValueError(f"{id_} is not an id of this vocabulary of {self.vocab_size}")
            pieces.append(_readable(token) if self._byte_level else token.replace("▁", " "))
        return pieces


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer from a folder with tokenizer.json, that file, a .gguf file or a hub id.

    Raises:
        FileNotFoundError: there is no such path or repository, or it has no tokenizer.json.
        ValueError: the file cannot be read, or holds a kind of vocabulary that is not handled.
    """
    path = find(source, TOKENIZER_PATTERNS)
    if path.suffix == ".gguf":
        return Tokenizer(_from_gguf(read_gguf(path)))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer.json in {path}; transformers' AutoTokenizer reads other kinds "
            "and its save_pretrained writes one"
        )
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # all that the library raises is Exception itself
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error


def _from_gguf(file: GgufFile) -> tokenizers.Tokenizer:
    kind = file.get("tokenizer.ggml.model", str)
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    types = file.get_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"{file.path} has {len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens, types)
    else:
        raise ValueError(f"{file.path}: a {kind!r} vocabulary is not handled, only gpt2 and llama")
    # What is matched whole in the text, before anything else.
    for add, wanted in (
        (backend.add_special_tokens, _CONTROL),
        (backend.add_tokens, _USER_DEFINED),
    ):
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ == wanted]
        add([AddedToken(token, normalized=False) for token in chosen])
    return backend


def _byte_level(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE vocabulary with its merges (Radford et al. 2019, "GPT-2")."""
    split = file.get("tokenizer.ggml.pre", str)
    if split not in _SPLITS:
        raise ValueError(
            f"{file.path}: the pre-tokeniser {split!r} is not handled, only {', '.join(_SPLITS)}"
        )
    pairs = (merge.partition(" ") for merge in file.get_list("tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in pairs]
    # llama 3 looks a whole word up before it merges
    backend = _bpe(file, tokens, merges, ignore_merges=_SPLITS[split] == _LLAMA3)
    pattern = _SPLITS[split]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm"),
            ]
        )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """A sentencepiece BPE vocabulary (Kudo and Richardson 2018).

    It joins the neighbours whose union has the highest score, so that its merges are all the ways
    to cut each token into two, best token first. Between two cuts of one token sentencepiece joins
    what is leftmost in the text; here the longer left part goes first, as in Hugging Face's
    conversion, which can differ within runs such as "=====".
    """
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path} has {len(scores)} scores for {len(tokens)} tokens")
    score_of = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ == _NORMAL
    }
    merges = [
        (token[:cut], token[cut:])
        for token in score_of
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    merges.sort(key=lambda pair: (score_of["".join(pair)], len(pair[0])), reverse=True)
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    if unknown >= len(tokens):
        raise ValueError(f"{file.path}: the unknown token is {unknown} of {len(tokens)}")
    # A token of spaces that is matched in the text itself has to be spelled as there.
    tokens[:] = [
        token.replace("▁", " ") if type_ == _USER_DEFINED else token
        for token, type_ in zip(tokens, types, strict=True)
    ]
    backend = _bpe(
        file, tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown]
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    pieces: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        pieces.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(pieces)
    return backend


def _bpe(
    file: GgufFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(
                f"{file.path}: the merge of {left!r} and {right!r} is not of its tokens"
            )
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable characters
    for themselves, then the other bytes in order from U+0100 on (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _readable(token: str) -> str:
    if not all(character in _BYTES for character in token):
        return token  # an added token, spelled as itself
    text = bytes(_BYTES[character] for character in token).decode("utf-8", "surrogateescape")
    # a byte that is part of no character has become the code point U+DC00 + byte
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)
