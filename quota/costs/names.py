"""Which names mean the same model: provider prefixes, revisions, dates and case are taken off, nothing else.

A name is never made to mean another model: `-mini`, `-preview`, `-latest` and the like stay, and so does the region
class on Bedrock, where a regional profile is dearer than a global one. The exact spelling comes first, so that a dated
snapshot with a price of its own keeps it.
"""

from __future__ import annotations

import re

__all__ = ["family", "spellings"]

_ARN = re.compile(r"arn:aws[a-z-]*:bedrock:[^:]*:[^:]*:(?:foundation-model|inference-profile)/(.+)")
_PATH = re.compile(
    r"(?:(?:openai|azure|azure_ai|anthropic|bedrock|bedrock_converse|converse|invoke|aws|google|gemini|vertex_ai|models"
    r"|mistral|groq|deepseek|xai|x-ai|cohere|together_ai|fireworks_ai)/)+"
)
_REGION = re.compile(r"(?:us|eu|apac|au|jp|in|ca|sa|me|us-gov|regional|(global))\.(?=[a-z0-9-]+\.)")
_VENDOR = re.compile(r"(?:anthropic|openai|amazon|meta|mistral|cohere|deepseek|ai21|qwen|google|nvidia|writer)\.(?=.)")
# The first revision, or any behind a date: claude-v2:1, mistral-7b-v0:2 and nemotron-9b-v2:0 are other models.
_REVISION = re.compile(r"(?<=\d)-v1(?::0)?$|(?<=\d)(-[a-z0-9.-]+)-v1(?::0)?$|(?<=20\d{6})-v\d+:0$")
_DATE = re.compile(r"[-@]20\d{2}(-?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])$")


def spellings(model: str) -> tuple[str, ...]:
    """Returns the names under which a model may stand in the book of its provider, the most exact one first.

    Arguments:
        model: as the request names it, such as `openai/GPT-4o-2024-08-06` or `us.anthropic.claude-opus-4-8-v1:0`.

    Result: at least one name, in lower case. Each means the same model.
    """
    given = model.strip().lower()
    name = _bare_path(given)
    region = _REGION.match(name)
    if region:
        name = f"{'global' if region[1] else 'regional'}.{name[region.end() :]}"
    elif _VENDOR.match(name):  # called in its own region
        return tuple(dict.fromkeys((given, *_shortened(name), *_shortened(f"regional.{name}"))))
    return tuple(dict.fromkeys((given, _bare_path(given), *_shortened(name))))


def family(model: str) -> str:
    """Returns a model's name without anything around it: what the tables of multipliers and bounds speak of.

    Arguments: `model`, as in `spellings`. Result: such as `claude-opus-4-8`, wherever it runs.
    """
    name = _bare_path(model.strip().lower())
    name = _REGION.sub("", name, count=1) if _REGION.match(name) else name
    return _shortened(_VENDOR.sub("", name, count=1) if _VENDOR.match(name) else name)[-1]


def _bare_path(name: str) -> str:
    arn = _ARN.fullmatch(name)
    bare = arn[1] if arn else name
    path = _PATH.match(bare)
    return bare[path.end() :] or bare if path else bare


def _shortened(name: str) -> tuple[str, ...]:
    """The name, the name without revision, and without the date before that."""
    revised = _REVISION.sub(lambda match: match[1] or "", name)
    return (name, revised or name, _DATE.sub("", revised) or name)
