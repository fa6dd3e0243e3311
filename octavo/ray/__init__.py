"""Octavo on Ray Serve: `serve run octavo.ray:app`. Needs octavo[ray].

The options are those of `octavo serve`, from OCTAVO_... variables and octavo.toml, or the file that
OCTAVO_CONFIG names. It begins with `replicas` replicas, each with a GPU if device = "cuda"; autoscaling ends
idle ones. See docs/replicas.md.
"""

from octavo.ray.deployments import make_app, read_options

app = make_app(*read_options())
