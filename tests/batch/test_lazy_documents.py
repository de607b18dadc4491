"""A job without documents imports nothing that reads or writes documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from npu_runner.batch.rows.openai_format import parse_row
from tests.batch.scripted import row
from tests.prompts.image_bytes import encoded, photo

OF_DOCUMENTS = ("pypdfium2", "nh3", "markdownify", "bs4", "yaml", "reportlab")
PREPARED = """
import json, sys
import npu_runner.batch.job.run, npu_runner.batch.job.row_server, npu_runner.serving.workers.worker
from npu_runner.assets import SHAPES_VL
from npu_runner.cli.main import main
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor

processor = ChatProcessor(str(SHAPES_VL))
processor.identity()
prompt = processor(json.loads(sys.argv[1])["body"]["messages"], media=MediaRules(allowed_dir=sys.argv[2]))
print(json.dumps([len(prompt.images), *(name for name in sys.argv[3:] if name in sys.modules)]))
"""


def test_an_image_job_imports_no_library_of_documents(tmp_path: Path) -> None:
    """In one process, which does the work of the job and of its workers."""
    (tmp_path / "a.png").write_bytes(encoded(photo(40, 60)))
    request = row("a", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}])
    parse_row(request)
    done = subprocess.run([sys.executable, "-c", PREPARED, json.dumps(request), str(tmp_path), *OF_DOCUMENTS],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert json.loads(done.stdout) == [1]
