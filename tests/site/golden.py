"""What the golden scripts are rendered from. Run it to write them anew: python tests/site/golden.py"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pitools.site import load, user_scripts

SITES = ("alpha", "beta", "h100-ib", "gb200-nvl72", "gcp-a3-tpu", "aws-p5-efa", "local")
CASES = [(site, script) for site in SITES for script in ("train", "stage")]


def text(site: str, script: str) -> str:
    """Four nodes, one dataset, and for ranks a command that needs quoting."""
    command = [] if script == "stage" else ["python", "train.py", "--note", "it's 100% $HOME"]
    return user_scripts.render_for_user(
        load.load_site(site),
        script,
        command,
        nodes=4,
        tasks_per_node=1,
        gpus_per_node=None,
        time="2h",
        framework="jax",
        data={"demo": "/shared/data sets/demo/1f"},
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from devcluster_parts import layout, sites

    os.environ["PIT_SITE_PATH"] = tempfile.mkdtemp()
    created = layout.Layout(root=layout.DEFAULT_ROOT, settings=layout.Settings())
    for cluster in created.clusters:
        Path(os.environ["PIT_SITE_PATH"], f"{cluster.name}.toml").write_text(sites.site_file_text(created, cluster))
    folder = Path(__file__).resolve().parent.parent / "golden"
    for name, kind in CASES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{kind}.sbatch").write_text(text(name, kind))
