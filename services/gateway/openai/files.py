"""`/v1/files`: batch inputs as they were uploaded, batch outputs as they are rendered from results."""

from __future__ import annotations

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response

from meshfire.store.files import MAX_FILE_BYTES, Files, StoredFile
from services.gateway import sse
from services.gateway.access.door import Door
from services.gateway.dialect import Json
from services.gateway.errors import HttpError
from services.gateway.openai.batch_outputs import BatchOutputs

#: of a multipart body besides the file
_FORM_BYTES = 64 * 1024


class FilesApi:
    """Endpoints. `outputs` makes files that are not stored."""

    def __init__(self, files: Files, outputs: BatchOutputs, door: Door) -> None:
        self._files = files
        self._outputs = outputs
        self._door = door

    async def files(self, request: Request) -> Response:
        """GET lists, POST uploads."""
        visitor = await self._door.enter(request.headers)
        if request.method == "GET":
            found = await self._files.list_files(visitor.account_id)
            return _json({"object": "list", "data": [_object(one) for one in found], "has_more": False})
        name, purpose, content = await _upload(request)
        return _json(_object(await self._files.add(visitor.account_id, name, purpose, content)))

    async def file(self, request: Request) -> Response:
        """GET tells, DELETE removes."""
        visitor, file_id = await self._door.enter(request.headers), request.path_params["file_id"]
        if request.method == "DELETE":
            await self._files.remove(visitor.account_id, file_id)
            return _json({"id": file_id, "object": "file", "deleted": True})
        made = await self._outputs.file(visitor, file_id)
        if made is not None:
            return _json(made.facts)
        return _json(_object(await self._files.file(visitor.account_id, file_id)))

    async def content(self, request: Request) -> Response:
        """The bytes."""
        visitor, file_id = await self._door.enter(request.headers), request.path_params["file_id"]
        made = await self._outputs.file(visitor, file_id)
        content = made.content if made is not None else await self._files.content(visitor.account_id, file_id)
        return Response(content, media_type="application/octet-stream")


async def _upload(request: Request) -> tuple[str, str, bytes]:
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > MAX_FILE_BYTES + _FORM_BYTES:
        raise HttpError(413, f"a file has at most {MAX_FILE_BYTES} bytes", "file", "request_too_large")
    try:
        async with request.form(max_files=1, max_fields=16, max_part_size=_FORM_BYTES) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise HttpError(400, "file is missing", "file", "missing_required_parameter")
            if purpose != "batch":
                raise HttpError(400, f"purpose is {purpose!r}, expected 'batch'", "purpose", "invalid_value")
            content = await file.read(MAX_FILE_BYTES + 1)
            return file.filename or "file", "batch", content
    except MultiPartException as error:
        raise HttpError(400, f"the body is no multipart form: {error.message}", None, "invalid_value") from None


def _object(file: StoredFile) -> Json:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def _json(body: Json) -> Response:
    return Response(sse.to_json(body), media_type="application/json")
