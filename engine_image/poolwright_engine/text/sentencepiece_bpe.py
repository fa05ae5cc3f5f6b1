"""A SentencePiece BPE vocabulary, as GGUF files carry it, made into a fast tokenizer.

Such a vocabulary has scores and no list of merges: of all pairs of pieces that form a piece, the pair whose piece has
the best score is joined first. So the merges are every way to cut a piece in two, in the order of the scores.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types, in GGUF as in SentencePiece
_SPACE = "▁"


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown_id: int | None, prefix_space: bool
) -> Tokenizer:
    """Without its special tokens. `prefix_space`: text is treated as if a space came before it."""
    spelled = [_spelled(token) for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(spelled, scores, types),
            unk_token=None if unknown_id is None else spelled[unknown_id],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    as_piece, as_text = normalizers.Replace(" ", _SPACE), decoders.Replace(_SPACE, " ")
    before = [normalizers.Prepend(_SPACE)] if prefix_space else []
    after = [decoders.Strip(content=" ", left=1, right=0)] if prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, as_piece])
    tokenizer.decoder = decoders.Sequence([as_text, decoders.ByteFallback(), decoders.Fuse(), *after])
    return tokenizer


def _spelled(token: str) -> str:
    """Converters write pieces of nothing but spaces with real ones."""
    return token.replace(" ", _SPACE) if token.isspace() and "\n" not in token and "\t" not in token else token


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece takes user-defined pieces whole before it merges anything, so theirs come first here, in the
    file's order; all pieces of equal score, shorter first parts last, as transformers orders them."""
    joins = {
        piece: (kind == USER_DEFINED, 0.0 if kind == USER_DEFINED else score, -index)
        for index, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True))
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    found = [
        (rank, cut, piece)
        for piece, rank in joins.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joins and piece[cut:] in joins
    ]
    found.sort(key=lambda join: (join[0], join[1]), reverse=True)
    return [(piece[:cut], piece[cut:]) for _, cut, piece in found]
