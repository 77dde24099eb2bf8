"""Texts around the tiles of an image, which show a model the position of each tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from forge_core.contracts.errors import Problem
from forge_plugin_vision import Grid

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.resize.kinds import Overview
    from forge_plugin_images.rows import Footprint, Places, Tokens
    from forge_plugin_vision import ImageInput


@frozen(kw_only=True)
class TileText:
    """`[data.sources.tile_text]`: texts around images and their tiles. None of them is learned.

    Neighbouring texts are encoded together, as one, and special tokens that they spell out are special tokens.
    """

    before: str = ""
    """Before each image, such as `<img>` of InternVL."""
    tile: str = ""
    """Before each tile. `{row}` and `{column}` in it are its numbers, from 1: `<row_{row}_col_{column}>`."""
    between: str = ""
    """Between two tiles of a row, such as `<|tile_x_separator|>` of Llama 4."""
    row_end: str = ""
    """After the last tile of each row, such as a newline."""
    overview: str = ""
    """Before the overview of an image that has tiles."""
    single: str = ""
    """Before an image that is not cut, in place of both."""
    after: str = ""
    """After each image."""
    feature_row: str = ""
    """After each row of features but an image's last one, such as `[IMG_BREAK]` of Mistral 3."""

    def pieces(self, tiles: tuple[int, int], overview: Overview) -> list[str]:
        """Returns the texts before each grid of an image, and the one behind the last.

        Args:
            tiles: rows and columns.
            overview: where it stands.
        """
        if tiles == (1, 1):
            return [self.before + self.single, self.after]
        pieces, text = list[str](), self.before
        for mark in self._marks(tiles, overview):
            if mark is None:
                text += self.row_end
            else:
                pieces.append(text + mark)
                text = ""
        return [*pieces, text + self.after]

    def _marks(self, tiles: tuple[int, int], overview: Overview) -> Iterator[str | None]:
        """Yields the text of each grid, and None behind each row of tiles."""
        if overview == "first":
            yield self.overview
        for row in range(1, tiles[0] + 1):
            for column in range(1, tiles[1] + 1):
                own = self.tile.replace("{row}", str(row)).replace("{column}", str(column))
                yield (self.between if column > 1 else "") + own
            yield None
        if overview == "last":
            yield self.overview


@define
class TileTexts:
    """The tokens of a `TileText`."""

    texts: TileText
    tokenizer: Tokenizer
    _known: dict[str, Sequence[int]] = field(factory=dict, init=False)

    def footprint(
        self, grids: Sequence[Grid], tiles: tuple[int, int], overview: Overview, seen: ImageInput
    ) -> Footprint:
        """Returns what an image takes in a row, with its texts.

        Args:
            grids: of its tiles and its overview.
            tiles: rows and columns.
            overview: where it stands.
            seen: what the model has as its input.
        """
        from forge_plugin_images.rows import Footprint

        first, *following = self.texts.pieces(tiles, overview)
        runs: list[Tokens | Places] = [*self._tokens(first)]
        for grid, text in zip(grids, following, strict=True):
            runs += [*self._features(grid, seen), *self._tokens(text)]
        return Footprint(runs, grids)

    def _features(self, grid: Grid, seen: ImageInput) -> Iterator[Tokens | Places]:
        """Yields the positions of a grid, with the text between its rows if there is one."""
        from forge_plugin_images.rows import Places

        if not self.texts.feature_row:
            yield Places(seen.positions(grid))
            return
        rows, columns = feature_sides(seen, grid)
        for row in range(rows):
            if row:
                yield from self._tokens(self.texts.feature_row)
            yield Places(columns)

    def _tokens(self, text: str) -> list[Tokens]:
        from forge_plugin_images.rows import Tokens

        if text and text not in self._known:
            # Texts come from the job, not from data: anything in them that looks like a special token is meant as one.
            tokenizer: Any = self.tokenizer
            encode: Callable[[str], list[int]] = getattr(tokenizer, "encode_special", tokenizer.encode)
            self._known[text] = encode(text)
        return [Tokens(self._known[text], False)] if text else []


def feature_sides(seen: ImageInput, grid: Grid) -> tuple[int, int]:
    """Returns rows and columns of an image's features, if its adapter makes one of each square of patches."""
    features, side = seen.encoder.feature_grid(grid), seen.adapter.multiple
    return features.rows // side, features.columns // side


def row_problems(texts: TileText, seen: ImageInput) -> Iterator[Problem]:
    """Yields why no text can stand between rows of features; paths are relative to the table of texts."""
    if not texts.feature_row:
        return
    # By example: an adapter declares a count of features, not how they lie.
    side = seen.format.multiple
    grids = [Grid(1, side, side), Grid(1, 2 * side, 3 * side)]
    rows, columns = zip(*(feature_sides(seen, grid) for grid in grids), strict=True)
    if [seen.positions(grid) for grid in grids] != [rows[0] * columns[0], rows[1] * columns[1]]:
        adapter, fusion = type(seen.adapter).__name__, type(seen.fusion).__name__
        message = f"{texts.feature_row!r} stands between rows of features"
        hint = "take adapter and fusion with a position for each square of patches, or leave it out"
        yield Problem("feature_row", f"{message}, which images have not with {adapter} and {fusion}; {hint}")
