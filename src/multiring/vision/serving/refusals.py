"""`RequestError`: a request that is answered with an error, and its HTTP status."""

from multiring.errors import MultiringError

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TIMED_OUT, TOO_LARGE = 400, 401, 403, 404, 408, 413
WRONG_TYPE, TOO_MANY, FAILED, UNAVAILABLE = 415, 429, 500, 503


class RequestError(MultiringError, ValueError):
    """A request that the server does not answer.

    Attributes:
        status: the HTTP status.
        retry_after_s: seconds after which the client may try again; 0 if that is no use.
    """

    def __init__(self, status: int, text: str, *, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s
