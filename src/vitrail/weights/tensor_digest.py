"""A digest of weights, by which two models are known to be equal."""

import collections
import concurrent.futures
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_HASH_THREADS = 8


def digest_tensors(tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str:
    """The sha256 of all names and of each tensor's sha256: equal weights have equal digests.

    Several threads hash, since training waits for it. `gather` makes a sharded tensor whole; no more of them are whole
    at once than there are threads.
    """

    def hash_tensor(name: str, tensor: Tensor) -> bytes:
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return name.encode() + hashlib.sha256(values.data).digest()

    digest, pending = hashlib.sha256(), collections.deque[concurrent.futures.Future[bytes]]()
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        for name in sorted(tensors):
            if len(pending) == _HASH_THREADS:
                digest.update(pending.popleft().result())
            pending.append(pool.submit(hash_tensor, name, gather(tensors[name].detach())))
        for future in pending:
            digest.update(future.result())
    return digest.hexdigest()
