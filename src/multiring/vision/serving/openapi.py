"""The server's OpenAPI description."""

from typing import Any

from multiring._version import VERSION

_MODEL = "/v2/models/{model}"
_VERSIONED = "/v2/models/{model}/versions/{version}"


def openapi(*, with_tokens: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the server."""
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": _operation("Whether the server is alive", 200, 503)},
        "/v2/health/ready": {"get": _operation("Whether the server takes requests", 200, 503)},
        "/v2": {"get": _operation("The server's name, version and extensions")},
        "/v2/repository/index": {"post": _operation("All models and versions")},
        "/metrics": {"get": _operation("OpenMetrics", content="application/openmetrics-text")},
    }
    for base in (_MODEL, _VERSIONED):
        names = ["model", *(["version"] if base is _VERSIONED else [])]
        paths[base] = {"get": _operation("A model's metadata", 200, 404), **_parameters(names)}
        paths[f"{base}/ready"] = {"get": _operation("Whether a model is ready", 200, 404), **_parameters(names)}
        infer = _operation("Compute a model's outputs from tensors", 200, 400, 404, 408, 413, 415, 429, 503)
        infer["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/InferenceRequest"}},
                "application/octet-stream": {
                    "schema": {"type": "string", "format": "binary"},
                },
            },
        }
        paths[f"{base}/infer"] = {"post": infer, **_parameters(names)}
        picture = _operation("Answer for pictures", 200, 400, 404, 408, 413, 415, 429, 503)
        form = {
            "type": "object",
            "properties": {"picture": {"type": "array", "items": {"type": "string", "format": "binary"}}},
        }
        picture["requestBody"] = {
            "required": True,
            "content": {
                "image/*": {"schema": {"type": "string", "format": "binary"}},
                "multipart/form-data": {"schema": form},
            },
        }
        answer = {"schema": {"$ref": "#/components/schemas/Answers"}}
        picture["responses"]["200"]["content"] = {"application/json": answer}
        paths[f"{base}/picture"] = {"post": picture, **_parameters(names)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "multiring vision serve", "version": VERSION},
        "paths": paths,
        "components": {"schemas": _SCHEMAS, **({"securitySchemes": _BEARER} if with_tokens else {})},
        **({"security": [{"token": []}]} if with_tokens else {}),
    }


_BEARER = {"token": {"type": "http", "scheme": "bearer"}}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "datatype": {"type": "string"},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
}
_SCHEMAS = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "InferenceRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "minItems": 1, "items": _TENSOR},
            "outputs": {"type": "array"},
            "parameters": {"type": "object"},
        },
    },
    "Answers": {
        "type": "object",
        "required": ["model_name", "model_version", "answers"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "answers": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "picture": {"type": "string"},
                        "width": {"type": "integer"},
                        "height": {"type": "integer"},
                        "confidence": {"type": "number"},
                        "labels": {"type": "array", "items": {"type": "object"}},
                    },
                },
            },
        },
    },
}


def _operation(summary: str, *statuses: int, content: str = "application/json") -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in statuses or (200,):
        kind = content if status == 200 else "application/json"
        schema = {"type": "object"} if status == 200 else {"$ref": "#/components/schemas/Error"}
        responses[str(status)] = {"description": _MEANINGS[status], "content": {kind: {"schema": schema}}}
    return {"summary": summary, "responses": responses}


def _parameters(names: list[str]) -> dict[str, Any]:
    return {"parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]}


_MEANINGS = {
    200: "done",
    400: "the request is malformed",
    404: "there is no such model or version",
    408: "the body did not come in time",
    413: "the body, the picture or a tensor is too large",
    415: "the body is packed in an unknown way",
    429: "too many requests are on their way; see Retry-After",
    503: "the server ends, or the answer took too long; see Retry-After",
}
