"""Turns an encoded video into pairs of resized frames, each as an image of six colours. Knows nothing of prompts.

More than two where a checkpoint's patches are deeper. A pair is the unit of the tower, of a prompt's places and of the
vision cache. So a repeated or overlapping video costs only its new pairs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.file_kinds import GIF, image_kind
from npu_runner.prompts.media.images import image_input
from npu_runner.prompts.media.media import Media
from npu_runner.prompts.media.video_settings import ASSUMED_FPS, VideoSettings
from npu_runner.request.limits import LIMITS, field_error
from npu_runner.request.prompt_inputs import ImageInput

# H, W sides of a resized frame


@dataclass(frozen=True)
class Video:
    """A video of a message that was not read yet: encoded bytes, or their address."""

    source: bytes | Media

    @classmethod
    def from_source(cls, given: Any, where: str) -> Video:
        """A video of encoded bytes, or of their address. Raises RequestError naming `where`."""
        if isinstance(given, cls):
            return given
        if isinstance(given, (bytes, bytearray, memoryview)):
            return cls(bytes(given))
        if isinstance(given, Media):
            return cls(given)
        raise field_error(where, f"the encoded bytes of a video are needed, not {type(given).__name__}; decoded frames "
                          "do not say when they are shown: encode them, or send them as images", "invalid_type")


@dataclass(frozen=True)
class VideoInput:
    """A video for the tower, with the time of each pair and the seconds between pairs."""

    pairs: list[ImageInput]
    timestamps: list[float]
    seconds_per_pair: float


def prepare_video(data: bytes, settings: VideoSettings, *, check_tokens: Callable[[int], None]) -> VideoInput:
    """Sample, decode and resize. `check_tokens` gets the number of tokens of all pairs before they are decoded. Raises
    RequestError, never another error, for a bad video."""
    with VideoFile(data) as file:
        indices = settings.sample(file.num_frames, file.fps).tolist()
        height, width = settings.fit(len(indices), file.height, file.width)
        timestamps = settings.timestamps(indices, file.fps)
        check_tokens(len(timestamps) * settings.frame.num_tokens(height, width))
        frames = (_resized(frame, len(indices), settings) for frame in file.frames(indices))
        seconds_per_pair = settings.seconds_per_pair(len(indices), file.num_frames, file.fps)
        return VideoInput(list(_pairs(frames, settings)), timestamps, seconds_per_pair)


def _resized(pixels_HWC: np.ndarray, num_frames: int, settings: VideoSettings) -> np.ndarray:
    height, width = settings.fit(num_frames, *pixels_HWC.shape[:2])
    # Pillow on uint8, as for images.
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width, height), resample=Image.Resampling(settings.frame.resample)))


def _pairs(frames: Iterator[np.ndarray], settings: VideoSettings) -> Iterator[ImageInput]:
    """Frames in groups of as many as a patch is deep; the last one is repeated to fill its group."""
    group: list[np.ndarray] = []
    for frame in frames:
        group.append(frame)
        if len(group) == settings.frame.temporal_patch_size:
            yield _pair(group, settings)
            group = []
    if group:
        yield _pair(group + group[-1:] * (settings.frame.temporal_patch_size - len(group)), settings)


def _pair(frames: list[np.ndarray], settings: VideoSettings) -> ImageInput:
    return image_input(np.concatenate(frames, axis=2), settings.frame)


def no_videos(why: str, where: str) -> RequestError:
    return field_error(where, f"this model takes no videos here: {why}; send frames of it as images",
                       "model_has_no_video")

# -- encoded files -----------------------------------------------------------------------------------------------------


# H, W sides of a frame as it is shown

# Demuxers by name. Playlists and the like are none of them: they would have the decoder open other files.
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,h264,hevc,m4v,ivf,gif"
_NO_PTS = -(1 << 63)
# A video that ends earlier than it says was cut off. Rounded times, and a last frame that does not say how long it is
# shown, are no reason to say so.
_MISSING_SECONDS = 0.2
_MISSING_FRAMES = 2
_MISSING_SHARE = 0.02
_MAX_DETAIL_CHARS = 200


class VideoFile:
    """A video whose frames were counted. A context.

    Raises RequestError with code video_package_missing, video_empty, video_not_recognised, video_no_stream,
    video_too_long, video_too_many_frames, video_too_large, video_truncated, video_broken or video_out_of_memory.
    """

    def __init__(self, data: bytes):
        if not data:
            raise RequestError("the video has zero bytes", "video_empty")
        # Of an animated AVIF, FFmpeg reads one frame.
        if (kind := image_kind(data[:32])) not in (None, GIF):
            raise RequestError(f"the file is an image ({kind}) and not a video; send it as one: image_url in a "
                               "message, --image", "video_not_recognised")
        self._av = _load_av()
        self._data = data
        with self._opened() as (container, stream):
            _check_declared(container, stream)
            self.width, self.height = stream.width, stream.height
            self._pts, self._starts = _scan(container, stream)
            self.fps = _rate(stream)
        self.num_frames = len(self._pts)
        if not self.num_frames:
            raise RequestError("the video has no frames", "video_empty")

    def __enter__(self) -> VideoFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._data = b""

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """uint8 (H, W, 3) of each of these frames. `indices`: ascending. Raises RequestError where one is not there."""
        with self._opened() as (container, stream):
            found = self._by_time(container, stream, indices) if self._is_timed else _by_count(container, stream)
            number, frame = -1, None
            for index in indices:
                while number < index:
                    number, frame = next(found, (len(self._pts), None))
                if number != index or frame is None:
                    raise RequestError(f"frame {index} of {self.num_frames} cannot be decoded; encode the video again",
                                       "video_broken")
                self._check_size(frame)
                yield _upright(frame)

    @property
    def _is_timed(self) -> bool:
        return len(set(self._pts)) == len(self._pts) and _NO_PTS not in self._pts

    def _by_time(self, container: Any, stream: Any, indices: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(index, frame) of the groups in which the wanted frames lie."""
        shown = sorted(self._pts)
        index_of = {pts: index for index, pts in enumerate(shown)}
        is_wanted = _wanted_groups(self._pts, self._starts, {shown[index] for index in indices})
        decoder, group, start = stream.codec_context, -1, None
        for packet in container.demux(stream):
            group += packet.is_keyframe and packet.size > 0
            if group >= 0 and not is_wanted[group]:
                if start is not None:
                    yield from _numbered(decoder.decode(None), index_of, start)
                    decoder.flush_buffers()
                    start = None
                continue
            start = (packet.pts or 0) if start is None else start
            yield from _numbered(decoder.decode(packet), index_of, start)

    def _check_size(self, frame: Any) -> None:
        if (frame.width, frame.height) != (self.width, self.height):
            raise RequestError(
                f"the video declares {self.width}x{self.height} pixels and has a frame of {frame.width}x{frame.height}"
                "; encode it again", "video_size_changes")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first video, with the decoder's errors as ours."""
        # All decoders get the options, also those that probe the file. A worker has one core.
        codec_options = {"max_pixels": str(LIMITS.max_video_pixels), "threads": "1"}
        what = "opened"
        try:
            with self._av.open(
                io.BytesIO(self._data), options={"format_whitelist": _CONTAINERS, **codec_options},
                metadata_errors="replace") as container:
                what = "decoded"
                stream = _video_of(container)
                stream.codec_context.options = codec_options
                with _memory_told_from_damage(stream):
                    yield container, stream
        except RequestError:
            raise
        except MemoryError as error:
            raise RequestError("the video needs more memory than there is; scale it down",
                               "video_out_of_memory") from error
        except Exception as error:  # decoders fed with hostile bytes raise anything; only this row may fail
            raise _decoding_error(self._data, error, what) from error


def _load_av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise RequestError(
            f"videos are decoded by PyAV, which is not there ({error}); pip install 'av>=17.1'",
            "video_package_missing") from error


def _video_of(container: Any) -> Any:
    av_disposition = importlib.import_module("av.stream").Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & av_disposition:  # the cover of a record is no video
            if stream.codec_context is None:
                raise RequestError("the video is in a codec that PyAV does not decode; encode it again",
                                   "video_not_recognised")
            return stream
    raise RequestError("the file has no video, only sound or text", "video_no_stream")


def _check_declared(container: Any, stream: Any) -> None:
    seconds = _declared_seconds(container, stream)
    if seconds > LIMITS.max_video_seconds:
        raise RequestError(
            f"the video declares {seconds:.0f} seconds, at most {LIMITS.max_video_seconds} are allowed "
            "(max_video_seconds); cut it", "video_too_long")
    _check_count(stream.frames)
    if not 0 < stream.width * stream.height <= LIMITS.max_video_pixels:
        # With a limit set, a decoder forgets a size beyond it.
        raise RequestError(f"the video declares no size, or more than the {LIMITS.max_video_pixels} pixels allowed "
                           "(max_video_pixels); scale it down", "video_too_large")


def _check_count(num_frames: int) -> None:
    if num_frames > LIMITS.max_video_frames:
        raise RequestError(
            f"the video has {num_frames} frames or more, at most {LIMITS.max_video_frames} are allowed "
            "(max_video_frames); cut it", "video_too_many_frames")


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or ASSUMED_FPS)


def _declared_seconds(container: Any, stream: Any) -> float:
    of_all = float(container.duration or 0) / 1e6
    return max(of_all, float((stream.duration or 0) * stream.time_base))


def _scan(container: Any, stream: Any) -> tuple[array[int], list[int]]:
    """The time stamp of each frame that is shown, in the order of the file, and where groups of images begin in it.

    Raises RequestError for a file that ends before it should.
    """
    pts: array[int] = array("q")
    starts: list[int] = []
    num_packets, end_seconds = 0, 0.0
    for packet in container.demux():
        if packet.pts is not None:
            end_seconds = max(end_seconds, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index != stream.index or packet.size == 0:
            continue
        num_packets += 1
        _check_count(num_packets)
        if packet.is_keyframe:
            starts.append(len(pts))
        if not packet.is_discard:
            pts.append(_NO_PTS if packet.pts is None else packet.pts)
    start = float(container.start_time or 0) / 1e6
    declared = float(container.duration or 0) / 1e6
    missing = declared - (end_seconds - start)
    is_cut = missing > max(_MISSING_SECONDS + _MISSING_FRAMES / _rate(stream), _MISSING_SHARE * declared)
    if num_packets < stream.frames or (end_seconds and is_cut):
        raise RequestError(
            f"the video is cut off: it declares {stream.frames or 'an unknown number of'} frames and {declared:.1f} "
            f"seconds, {num_packets} frames and {end_seconds - start:.1f} seconds are there; upload it again",
            "video_truncated")
    return pts, starts


def _wanted_groups(pts: Sequence[int], starts: Sequence[int], wanted: set[int]) -> list[bool]:
    """For each group of images whether it has to be decoded. Frames shown before the first one of their group may
    lean on the group before it, but on none before that."""
    bounds = [*starts, len(pts)]
    groups = [pts[begin:end] for begin, end in pairwise(bounds)]
    has_wanted = [any(stamp in wanted for stamp in group) for group in groups]
    leans = [has and any(stamp < group[0] for stamp in group) for has, group in zip(has_wanted, groups, strict=True)]
    return [has or leant_on for has, leant_on in zip(has_wanted, [*leans[1:], False], strict=True)]


def _numbered(frames: Sequence[Any], index_of: dict[int, int], start: int) -> Iterator[tuple[int, Any]]:
    """(index, frame) of the frames that are shown. A damaged frame damages all that depend on it. Frames before
    `start`, where decoding started, depend on frames that were not decoded, and are not used."""
    for frame in frames:
        if frame.is_corrupt and (frame.pts is None or frame.pts >= start):
            raise _damaged(frame)
        if frame.pts in index_of and not frame.is_corrupt:
            yield index_of[frame.pts], frame


def _by_count(container: Any, stream: Any) -> Iterator[tuple[int, Any]]:
    for number, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise _damaged(frame)
        yield number, frame


def _damaged(frame: Any) -> RequestError:
    when = "" if frame.time is None else f" after {frame.time:.1f} seconds"
    return RequestError(f"the video is damaged{when}; encode it again", "video_broken")


def _upright(frame: Any) -> np.ndarray:
    """The pixels as the file wants them shown: its display matrix may turn and mirror them."""
    pixels_HWC = frame.to_ndarray(format="rgb24", threads=1)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels_HWC
    a, b, _, c, d = np.frombuffer(bytes(matrix), dtype=np.int32)[:5].tolist()
    if (a or d) and (b or c):
        raise RequestError("the video is to be turned by an angle that is no multiple of 90 degrees; encode it upright",
                           "video_rotation")
    if b and c:
        pixels_HWC, a, d = pixels_HWC.swapaxes(0, 1), c, b
    return pixels_HWC[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


@contextlib.contextmanager
def _memory_told_from_damage(stream: Any) -> Iterator[None]:
    """Decoders that get no memory for a frame call the video broken: then there is none for two images of it, too."""
    try:
        yield
    except ValueError as error:
        try:
            mmap.mmap(-1, max(1, 6 * stream.width * stream.height)).close()
        except OSError:
            raise MemoryError from error
        raise


def _decoding_error(data: bytes, error: Exception, what: str) -> RequestError:
    detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]
    if data[4:8] == b"ftyp" and b"moov" not in data:
        return RequestError(f"the video is cut off: its table of contents is missing ({detail}); upload it again",
                            "video_truncated")
    if what == "opened":
        return RequestError(f"not a video this runner reads, or only a part of one ({detail}); encode it as H.264 in "
                            "MP4", "video_not_recognised")
    return RequestError(f"the video cannot be decoded ({detail}); encode it as H.264 in MP4", "video_broken")
