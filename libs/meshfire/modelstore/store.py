"""The model cache as a whole: pull, list, resolve, remove. What the command line and the services call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from meshfire.cache_dir import cache_dir
from meshfire.errors import BadInput, CheckpointError, UnknownModel
from meshfire.modelstore import install, manifest
from meshfire.modelstore.cache import Cache, checked_name
from meshfire.modelstore.progress import Progress, silent
from meshfire.modelstore.source import Source, parse

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedModel:
    """One model of the cache. `damage` says what is wrong with it, None if nothing is seen at a glance."""

    name: str
    directory: Path
    source: str
    created: str
    size_bytes: int
    damage: str | None


def pull(
    spec: str,
    *,
    name: str | None = None,
    root: Path | None = None,
    progress: Progress = silent,
    source: Source | None = None,
) -> Path:
    """Get a model into the cache and return its folder; at once if it is there and every byte verifies.

    `spec` is as in `meshfire.modelstore.source`; `name` is what to call it (default: from the spec); `source` replaces
    the one that the spec names. Killed at any point, the model is either not there or complete. A second pull of the
    same name waits for the first. Raises BadInput, UnknownModel, Unavailable, DataLoss or CheckpointError.
    """
    default_name, parsed = parse(spec) if source is None else (spec, source)
    chosen, cache = checked_name(name or default_name), Cache(root or cache_dir())
    with install.locked(cache, chosen, progress):
        present = install.installed(cache, chosen, deep=True, progress=progress)
        if present is None:
            return install.install(
                cache, chosen, parsed.label, parsed.build, resumable=parsed.resumable, progress=progress
            )
        if present.source != parsed.label:
            raise BadInput(
                f"the cache has a model {chosen!r} from {present.source}, not from {parsed.label}: "
                "remove it, or choose another name",
                field="name",
            )
        log.info("%s is in the cache and verified", chosen)
        return cache.model(chosen)


def list_models(*, root: Path | None = None) -> list[CachedModel]:
    """Every model of the cache, by name."""
    cache = Cache(root or cache_dir())
    return [_look_at(name, cache.model(name)) for name in cache.names()]


def resolve(name_or_directory: str | Path, *, root: Path | None = None) -> Path:
    """The folder of a model: a folder that has a config.json, or the name of a cached model.

    Raises UnknownModel with the names that exist, CheckpointError for a cached model that is visibly damaged.
    """
    given = Path(name_or_directory).expanduser()
    if (given / "config.json").is_file():
        return given.absolute()
    found = {model.name: model for model in list_models(root=root)}
    model = found.get(str(name_or_directory))
    if model is None:
        names = ", ".join(found) or "none; `meshfire models pull smollm2-135m-instruct` gets the default"
        raise UnknownModel(f"no model {str(name_or_directory)!r}: neither a model folder nor cached (cached: {names})")
    if model.damage:
        raise CheckpointError(f"model {model.name!r} is damaged ({model.damage}): pull it again")
    return model.directory


def remove(name: str, *, root: Path | None = None, progress: Progress = silent) -> None:
    """Delete a model, and what interrupted pulls of it left. Raises UnknownModel."""
    cache = Cache(root or cache_dir())
    if not cache.models.is_dir():
        raise UnknownModel(f"no model {name!r} in the cache")
    with install.locked(cache, name, progress):
        known = cache.model(name).is_dir() or cache.has_leftovers(name)
        install.uninstall(cache, name)
    if not known:
        raise UnknownModel(f"no model {name!r} in the cache")


def _look_at(name: str, directory: Path) -> CachedModel:
    try:
        found = manifest.read(directory)
    except CheckpointError as error:
        return CachedModel(name, directory, "", "", 0, str(error))
    damage = manifest.damage(directory, found, deep=False)
    return CachedModel(name, directory, found.source, found.created, found.size_bytes, damage)
