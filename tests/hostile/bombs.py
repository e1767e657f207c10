"""Pickles that would leave a mark if anybody ran them, in every dress that files of this field come in."""

import io
import os
import pickle

import numpy as np
import torch


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def bombs(marker):
    """Name and bytes of each."""
    bomb = Bomb(marker)
    objects = np.array([bomb], dtype=object)
    plain, zipped, legacy, array, arrays = (io.BytesIO() for _ in range(5))
    pickle.dump({"a": bomb}, plain, protocol=4)
    torch.save({"a": bomb}, zipped)
    torch.save({"a": bomb}, legacy, _use_new_zipfile_serialization=False)
    np.save(array, objects, allow_pickle=True)
    np.savez(arrays, a=objects)
    files = {"protocol 0": pickle.dumps(bomb, 0), "protocol 2": pickle.dumps([bomb], 2), "protocol 4": plain.getvalue()}
    return {**files, "torch": zipped.getvalue(), "torch, old": legacy.getvalue(), "npy": array.getvalue(), "npz": arrays.getvalue()}
