"""How a declaration names filters and annotators: built-in ones by a table, your own by import path.

Building checks the type and every parameter and does no work, so it also checks a declaration. Importing a module
registers nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from mm_assets.errors import ConfigError, meant
from mm_assets.fields.registry import load_class
from mm_assets.filters.base import Annotator, Filter
from mm_assets.rows.schema import PIPELINE_FILTERS, UserColumn

__all__ = ["BUILTIN_ANNOTATORS", "BUILTIN_FILTERS", "build_annotator", "build_filter", "parameter_schemas"]

# Type name in a declaration -> where the class is. Classes are imported when they are first built.
BUILTIN_FILTERS: Mapping[str, str] = {
    "aspect_ratio": "mm_assets.filters.image:AspectRatioFilter",
    "audio_duration": "mm_assets.filters.audio:AudioDurationFilter",
    "audio_silence": "mm_assets.filters.audio:AudioSilenceFilter",
    "blur": "mm_assets.filters.image:BlurFilter",
    "exact_duplicates": "mm_assets.filters.duplicates:ExactDuplicatesFilter",
    "has_modalities": "mm_assets.filters.presence:HasModalitiesFilter",
    "image_size": "mm_assets.filters.image:ImageSizeFilter",
    "image_to_text_ratio": "mm_assets.filters.text:ImageToTextRatioFilter",
    "near_duplicates": "mm_assets.filters.near_duplicates:NearDuplicatesFilter",
    "text_length": "mm_assets.filters.text:TextLengthFilter",
    "video_duration": "mm_assets.filters.video:VideoDurationFilter",
}
BUILTIN_ANNOTATORS: Mapping[str, str] = {
    "audio_duration": "mm_assets.filters.annotators:AudioDurationAnnotator",
    "blur": "mm_assets.filters.annotators:BlurAnnotator",
    "content_hash": "mm_assets.filters.annotators:ContentHashAnnotator",
    "image_size": "mm_assets.filters.annotators:ImageSizeAnnotator",
    "image_to_text_ratio": "mm_assets.filters.annotators:ImageToTextRatioAnnotator",
    "perceptual_hash": "mm_assets.filters.annotators:PerceptualHashAnnotator",
    "silence": "mm_assets.filters.annotators:SilenceAnnotator",
    "text_length": "mm_assets.filters.annotators:TextLengthAnnotator",
    "video_info": "mm_assets.filters.annotators:VideoInfoAnnotator",
}


def build_filter(config: Mapping[str, Any], *, where: object, key: str) -> Filter:
    """Makes one fresh filter from its declaration.

    Args:
        config: ``type``, a name of `BUILTIN_FILTERS` or ``module:Class``; the class's parameters; and for every filter
            ``name`` (default: the type's), ``after_content`` (default false), and, unless the class has a parameter of
            that name, ``scope`` (default: the class's).
        where: the file of the declaration, for messages.
        key: dotted path of the declaration in it.

    Raises:
        ConfigError: the type is unknown, or a parameter is unknown, missing or wrong.
    """
    common: dict[str, Any] = {}
    built: Filter = _build(config, Filter, BUILTIN_FILTERS, where, key, common, ("name", "after_content", "scope"))
    if built.scope not in ("row", "sample"):
        raise ConfigError(where, f"{key}.type", f"{built.name} has the scope {built.scope!r}, allowed: row, sample")
    if built.name in PIPELINE_FILTERS:
        detail = f"{built.name!r} is the pipeline's own; not allowed: {', '.join(sorted(PIPELINE_FILTERS))}"
        raise ConfigError(where, f"{key}.name", detail)
    after = common.get("after_content", False)
    if not isinstance(after, bool):
        raise ConfigError(where, f"{key}.after_content", f"is {after!r}, expected true or false")
    built.after_content = after or built.after_content
    if "scope" in common:
        # A filter of rows may drop the whole sample; a filter of samples cannot name a single row.
        allowed = ("row", "sample") if built.scope == "row" else ("sample",)
        if common["scope"] not in allowed:
            raise ConfigError(where, f"{key}.scope", f"is {common['scope']!r}, allowed: {', '.join(allowed)}")
        built.scope = common["scope"]
    return built


def build_annotator(config: Mapping[str, Any], *, where: object, key: str) -> Annotator:
    """Makes one fresh annotator from its declaration; arguments and errors as `build_filter`.

    Of the keys that every filter takes, an annotator takes ``name`` only.
    """
    built: Annotator = _build(config, Annotator, BUILTIN_ANNOTATORS, where, key, {}, ("name",))
    if not built.columns or not all(isinstance(column, UserColumn) for column in built.columns):
        raise ConfigError(where, f"{key}.type", f"{built.name} declares no columns, expected `UserColumn`s")
    return built


def parameter_schemas(table: Mapping[str, str], base: type) -> dict[str, dict[str, Any]]:
    """The JSON schema of each key that a declaration of a built-in filter or annotator may have, by type name.

    Args:
        table: `BUILTIN_FILTERS` or `BUILTIN_ANNOTATORS`.
        base: `Filter` or `Annotator`.
    """
    from pydantic import TypeAdapter

    text = {"type": "string"}
    common = {"name": text, **({"after_content": {"type": "boolean"}, "scope": text} if base is Filter else {})}
    found = {}
    for kind, place in table.items():
        cls = load_class(place, base)
        hints = get_type_hints(cls.__init__)
        names = inspect.signature(cls).parameters
        found[kind] = {**common, **{name: TypeAdapter(hints[name]).json_schema() for name in names}}
    return found


def _build(
    config: Mapping[str, Any],
    base: type,
    table: Mapping[str, str],
    where: object,
    key: str,
    common: dict[str, Any],
    common_keys: Sequence[str],
) -> Any:
    if not isinstance(config, Mapping):
        raise ConfigError(where, key, f"is {config!r}, expected keys and values with a `type`")
    kind = config.get("type")
    what = base.__name__.lower()
    if not isinstance(kind, str) or not (kind in table or ":" in kind):
        found = "is missing" if kind is None else f"is {kind!r}"
        allowed = f"built in: {', '.join(sorted(table))}; or your own as module:Class{meant(kind, table)}"
        raise ConfigError(where, f"{key}.type", f"{found}, expected the type of {what}: {allowed}")
    try:
        cls: type[Any] = load_class(table.get(kind, kind), base)
    except ConfigError as error:
        raise ConfigError(where, f"{key}.type", error.detail) from error
    if "scope" in inspect.signature(cls).parameters:  # the class's own, and its meaning too
        common_keys = [name for name in common_keys if name != "scope"]
    given = {name: value for name, value in config.items() if name != "type" and name not in common_keys}
    common.update({name: config[name] for name in common_keys if name in config})
    _check_parameters(cls, kind, given, common_keys, where, key)
    try:
        built = cls(**given)
    except ConfigError as error:
        raise ConfigError(where, f"{key}.{error.key}", error.detail) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(where, key, f"{kind} does not take these parameters: {error}") from error
    name = config.get("name")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ConfigError(where, f"{key}.name", f"is {name!r}, expected text")
    try:
        built.name = name or built.name or (kind if kind in table else cls.__name__)
    except AttributeError as error:
        detail = f"{kind} makes frozen instances; its `name` must be assignable"
        raise ConfigError(where, f"{key}.type", detail) from error
    return built


def _check_parameters(
    cls: type, kind: str, given: Mapping[str, Any], common: Sequence[str], where: object, key: str
) -> None:
    parameters = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            detail = f"{kind} takes {parameter.name!r} by position; parameters must be keyword-only"
            raise ConfigError(where, f"{key}.type", detail)
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in given:
            if name not in names:
                allowed, maybe = ", ".join(["type", *common, *names]), meant(name, [*common, *names])
                raise ConfigError(where, f"{key}.{name}", f"is not a parameter of {kind}; allowed: {allowed}{maybe}")
    for parameter in parameters:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and parameter.name not in given:
            raise ConfigError(where, f"{key}.{parameter.name}", f"is missing; {kind} needs it")
