"""The places that a job writes to. Knows nothing of the content."""

from __future__ import annotations

from npu_runner.batch.files import place as files
from npu_runner.batch.files.place import Place, read_by
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError

_WRITTEN = ("output", "error_file", "report", "summary", "metrics_file")


def find_places(options: BatchOptions, config: RunnerConfig | None = None) -> dict[str, Place]:
    """The places by their options, before anything starts. Raises ConfigError for a name that cannot be written.

    `config`: the files that it names are no places to write to; None: no model is used.
    """
    named = [(option, getattr(options, option)) for option in _WRITTEN]
    places = files.find_places(named, read_by(options, *([] if config is None else [config])))
    is_stream = {option: place.is_stream for option, place in places.items()}
    if is_stream.get("metrics_file"):
        raise ConfigError(f"{places['metrics_file'].title}: is a stream, and it is replaced every other second; name a "
                          "file")
    if options.ordered and is_stream["output"]:
        raise ConfigError(f"ordered: {places['output'].title} is a stream, whose rows go out as they finish and cannot "
                          "be sorted afterwards; name a file as output, or leave --ordered out and sort what comes out "
                          "by custom_id")
    if "error_file" in places and is_stream["output"]:
        raise ConfigError(f"{places['error_file'].title}: the output is a stream, and who resumes the one cannot "
                          "resume the other; name a file as output, or leave it out")
    if is_stream.get("error_file"):
        raise ConfigError(f"{places['error_file'].title}: is no file; a stream cannot be resumed")
    return places
