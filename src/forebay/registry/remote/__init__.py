"""Remote model sources: S3, the Hugging Face Hub, MLflow. Each version is downloaded once; interrupted downloads
resume.

Each library is imported only when a source of its kind is used.
"""

from pathlib import Path

from forebay.registry.sources import Progress, RemoteSource, SourceError


def fetch_remote(source: RemoteSource, home: Path, progress: Progress) -> Path:
    """Download the file or folder of a remote source. Raises `SourceError`."""
    try:
        match source.scheme:
            case "s3":
                from forebay.registry.remote.s3 import fetch_s3

                return fetch_s3(source, home, progress)
            case "hf":
                from forebay.registry.remote.hub import fetch_hub

                return fetch_hub(source, progress)
            case _:
                from forebay.registry.remote.mlflow import fetch_mlflow

                return fetch_mlflow(source, home, progress)
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "hf": "hub"}.get(source.scheme)
        if extra is None:  # nothing optional: the installation is broken
            raise
        raise SourceError(f"{source}: needs {error.name}: pip install 'forebay[{extra}]'") from error
