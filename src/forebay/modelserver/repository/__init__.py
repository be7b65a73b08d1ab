"""Model repositories: folder contents, `config.pbtxt`, and what backends report about a model.

`scan` finds models, `read` validates the configuration of one, `complete` adds what the loaded model reports.
"""

from forebay.modelserver.repository.completing import ADOPTED, complete, same_but_instances
from forebay.modelserver.repository.describing import read
from forebay.modelserver.repository.finding import named, scan
from forebay.modelserver.repository.values import BadModel, Described, Found, Rules

__all__ = [
    "ADOPTED",
    "BadModel",
    "Described",
    "Found",
    "Rules",
    "complete",
    "named",
    "read",
    "same_but_instances",
    "scan",
]
