"""Image addresses reach data URLs and one folder, and nothing else on the machine."""

from __future__ import annotations

import base64
import json
import os
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.media import MediaRules, load_media
from npu_runner.prompts.text.messages import MediaLimits, parse_messages
from tests.full_set import examples

SECRET = b"the secret outside"
LIMITS_OF_TWO = MediaLimits(has_vision=True, max_images=2)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    folder = tmp_path / "allowed"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"image a")
    (folder / "sub" / "b c#1%.png").write_bytes(b"image b")
    return folder


def refusal(url: object, allowed: Path | None, **options: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load_media(url, allowed, **options)  # type: ignore[arg-type]
    assert SECRET.decode() not in caught.value.message
    return caught.value


@settings(max_examples=examples(100), deadline=None)
@given(content=st.binary(max_size=300))
def test_data_urls_give_their_bytes(content: bytes) -> None:
    encoded = base64.b64encode(content).decode()
    for body in (encoded, encoded.rstrip("="), quote(encoded, safe=""), encoded[:7] + "\n " + encoded[7:]):
        assert load_media(f"data:image/png;base64,{body}", None) == content
        for around in (" {} ", "\n{}", "\t{}\r\n"):
            assert load_media(around.format(f"data:image/png;base64,{body}"), None) == content
        assert load_media(f"data:image/png;charset=x; base64 ,{body}", None) == content
        assert load_media(f"DATA:image/png;charset=x;BASE64,{body}", None) == content
    assert load_media(f"data:,{quote(content)}", None) == content


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:",
        "data:;base64,!!!!",
        "data:;base64,abcde",
        "data:;base64,ab=c",
        "data:;base64,é",
        "data:;base64,_-_-",
    ],
)
def test_a_bad_data_url_is_refused(url: str) -> None:
    assert refusal(url, None).code == "media_bad_data_url"


@pytest.mark.parametrize(
    "url",
    [
        "http://x/a.png",
        "https://x/a.png",
        "HTTPS://X",
        "ftp://x/a",
        "s3://bucket/a",
        "javascript://x",
        "file://host/a.png",
        "file:///a.png?x=1",
        "file:///a.png#x",
        "file://[/a.png",
    ],
)
def test_other_addresses_are_refused(url: str, allowed: Path) -> None:
    assert refusal(url, allowed).code == "media_scheme"


def test_files_below_the_folder_are_read(allowed: Path) -> None:
    inside = allowed / "sub" / "b c#1%.png"
    for address in (
        "sub/b c#1%.png",
        "./sub/../sub/b c#1%.png",
        str(inside),
        f"file://{quote(str(inside))}",
        f"file://localhost{quote(str(inside))}",
        f"FILE:{quote(str(inside))}",
    ):
        assert load_media(address, allowed) == b"image b"
    (allowed / "link.png").symlink_to("a.png")
    (allowed / "folder").symlink_to(allowed / "sub")
    assert load_media("link.png", allowed) == b"image a"
    assert load_media("folder/b c#1%.png", str(allowed)) == b"image b"


def test_links_within_the_folder_are_followed_whatever_they_look_like(allowed: Path, tmp_path: Path) -> None:
    links = {
        "absolute": allowed / "a.png",
        "up": Path("sub", "..", "a.png"),
        "around": Path("..", "allowed", "a.png"),
        "sub/back": Path("..", "a.png"),
        "sub/chain": Path("back"),
        "elsewhere": tmp_path / "outside" / "in",
    }
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "in").symlink_to(allowed / "a.png")
    for name, target in links.items():
        (allowed / name).symlink_to(target)
    (allowed / "here").symlink_to(".")
    (allowed / "sub" / "parent").symlink_to("..")
    for address in (*links, "here/here/absolute", "sub/parent/sub/chain", f"{tmp_path}/outside/in", "a.png/",
                    "a.png/../a.png", "sub/../../allowed/sub/back", f"{allowed}/../allowed/a.png",
                    f"{tmp_path}//allowed/./a.png"):
        assert load_media(address, allowed) == b"image a", address
    assert refusal("/a.png", allowed).code == "media_not_allowed"


@pytest.mark.parametrize("num_links", [40, 41])
def test_forty_links_are_followed(num_links: int, allowed: Path) -> None:
    (allowed / "0").symlink_to("a.png")
    for number in range(1, num_links):
        (allowed / str(number)).symlink_to(str(number - 1))
    last = str(num_links - 1)
    if num_links == 40:
        assert load_media(last, allowed) == b"image a"
    else:
        assert refusal(last, allowed).code == "media_unreadable"


def test_the_folder_itself_may_be_a_link(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(allowed)
    assert load_media("a.png", tmp_path / "alias") == b"image a"
    assert load_media(str(tmp_path / "alias" / "a.png"), tmp_path / "alias") == b"image a"
    assert load_media(str(allowed / "a.png"), tmp_path / "alias") == b"image a"


def test_nothing_outside_the_folder_is_read(allowed: Path, tmp_path: Path) -> None:
    (allowed / "link").symlink_to(tmp_path / "secret.txt")
    (allowed / "up").symlink_to("..")
    (allowed / "chain").symlink_to("link")
    (allowed / "dangling").symlink_to(tmp_path / "not there")
    sibling = tmp_path / "allowed2"
    sibling.mkdir()
    (sibling / "x.png").write_bytes(SECRET)
    for address in (
        "../secret.txt",
        "sub/../../secret.txt",
        str(tmp_path / "secret.txt"),
        "link",
        "up/secret.txt",
        "chain",
        f"file://{tmp_path}/secret.txt",
        f"file://{tmp_path}/%2e%2e/etc/passwd",
        "/etc/passwd",
        "dangling",
        "../allowed2/x.png",
        str(sibling / "x.png"),
        f"{allowed}/../secret.txt",
    ):
        error = refusal(address, allowed)
        assert error.code == "media_not_allowed"
        assert "not there" not in error.message


def test_what_exists_outside_cannot_be_told_from_what_does_not(allowed: Path) -> None:
    exists, missing = refusal("../secret.txt", allowed), refusal("../secret.txx", allowed)
    assert exists.message.replace("txt", "txx") == missing.message


def test_no_folder_means_no_files(allowed: Path) -> None:
    for address in (str(allowed / "a.png"), f"file://{allowed}/a.png", "a.png", ""):
        error = refusal(address, None)
        assert error.code == "media_not_allowed"
        assert "--allowed-media-dir" in error.message


def test_what_is_not_a_readable_file_is_refused(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe")  # reading it would wait for a writer for ever
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(allowed / "socket"))
    (allowed / "loop").symlink_to("loop")
    expected = {
        "missing.png": "media_missing",
        "a.png/x": "media_missing",
        "sub": "media_unreadable",
        "": "media_unreadable",
        ".": "media_unreadable",
        "pipe": "media_unreadable",
        "socket": "media_unreadable",
        "loop": "media_unreadable",
        "nul\0.png": "media_unreadable",
        "x" * 5000: "media_unreadable",
        "file:///%00": "media_unreadable",
    }
    for address, code in expected.items():
        error = refusal(address, allowed)
        assert error.code == code, address[:20]
        assert len(error.message) < 400
        assert (code == "media_missing") == (f"no such file below '{allowed}'" in error.message)


def test_a_file_without_permission_is_refused(allowed: Path, tmp_path: Path) -> None:
    (allowed / "a.png").chmod(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # root may read anything, so a child asks as somebody else
        try:
            if os.geteuid() == 0:
                for parent in (allowed, tmp_path):
                    parent.chmod(0o755)
                os.chdir(allowed)
                os.chroot(allowed)
                os.setuid(65534)
                result = refusal("a.png", Path("/")).code
            else:
                result = refusal("a.png", allowed).code
        except BaseException as error:  # noqa: BLE001 - the child must not go on with the parent's tests
            result = repr(error)
        os.write(writer, result.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "media_unreadable"
    os.waitpid(child, 0)


def test_large_files_are_refused(allowed: Path) -> None:
    for url in ("a.png", "data:;base64," + base64.b64encode(b"image a").decode(), "data:,image%20a"):
        assert load_media(url, allowed, max_bytes=7) == b"image a"
        assert refusal(url, allowed, max_bytes=6).code == "media_too_large"
    assert refusal("data:;base64," + "A" * 100, None, max_bytes=8).code == "media_too_large"
    assert refusal("data:;base64,!" + "A" * 100, None, max_bytes=8).code == "media_too_large"


@pytest.mark.parametrize("url", [None, 7, b"a.png", ["a.png"], {"url": "a.png"}])
def test_an_address_must_be_text(url: object, allowed: Path) -> None:
    assert refusal(url, allowed).code == "invalid_type"


@settings(max_examples=examples(300), deadline=None)
@given(
    url=st.one_of(
        st.text(max_size=60),
        st.text(max_size=40).map("data:".__add__),
        st.text(max_size=40).map("file:".__add__),
        st.text(max_size=40).map("data:;base64,".__add__),
    )
)
def test_no_address_raises_anything_else(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    code = "media_read"
    try:
        load_media(url, tmp_path_factory.getbasetemp())
    except RequestError as error:
        code = error.code
    assert code.startswith(("media_", "invalid_"))


def test_lone_surrogates_are_refused(allowed: Path) -> None:
    for url in ("\ud800.png", "data:,\udfff", "file:///\udc80"):
        assert refusal(json.loads(json.dumps(url)), allowed).code == "invalid_unicode"


def test_a_missing_folder_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_media_dir"):
        load_media("a.png", tmp_path / "nowhere")


def test_image_url_parts_become_image_parts(allowed: Path) -> None:
    messages = [
        {"role": "system", "content": "x"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "?"},
                {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
                {"type": "image_url", "image_url": "data:,b"},
            ],
        },
    ]
    parsed = parse_messages(messages, LIMITS_OF_TWO, MediaRules(allowed_dir=allowed))
    image = {"type": "image", "image": "image"}
    assert parsed.messages == [messages[0], {"role": "user", "content": [{"type": "text", "text": "?"}, image, image]}]
    assert [image.load() for image, _ in parsed.seen] == [b"image a", b"b"]  # type: ignore[union-attr]
    assert messages[1]["content"][1]["type"] == "image_url"  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"url": "no.png"}, "media_missing"),
        ({}, "invalid_type"),
        (None, "invalid_type"),
        ({"url": 7}, "invalid_type"),
        ({"url": "a.png", "detail": "tiny"}, "unsupported_field"),
        ({"url": "http://x"}, "media_scheme"),
    ],
)
def test_a_bad_image_url_part_is_named(value: object, code: str, allowed: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": value}]}]
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].image_url") as caught:
        parse_messages(messages, LIMITS_OF_TWO, MediaRules(allowed_dir=allowed))
    assert caught.value.code == code
    assert (caught.value.param or "").startswith("messages[0].content[1].image_url")
