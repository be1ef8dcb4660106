"""A filter of system calls: what no program needs and what evades the limits of a sandbox is refused.

Memory that belongs to no process (``memfd_create``, System V shared memory) would be counted by cgroups only;
the rest are doors into the kernel that have had holes. A refused call fails with EPERM.
"""

from __future__ import annotations

import functools
import os
import platform
import struct

from strop.errors import ConfigError

# Numbers as in linux/arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_REFUSED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "mount": 165, "umount2": 166, "swapon": 167, "init_module": 175, "quotactl": 179, "io_setup": 206,
        "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "memfd_create": 319,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
        "mount_setattr": 442, "memfd_secret": 447,
    },
    "aarch64": {
        "io_setup": 0, "umount2": 39, "mount": 40, "pivot_root": 41, "quotactl": 60, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219,
        "swapon": 224, "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273,
        "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsmount": 432, "mount_setattr": 442, "memfd_secret": 447,
    },
}  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
_X32_CALLS = 0x40000000  # a second table of the same calls on x86-64

_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # in struct seccomp_data
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001


@functools.cache
def filter_program() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``.

    Raises ``ConfigError`` on a machine whose system calls are not known here.
    """
    machine = platform.machine()
    if machine not in _REFUSED:
        raise ConfigError(
            f"the sandbox for code knows the system calls of {', '.join(_REFUSED)}; this machine is {machine}"
        )
    refused = sorted(_REFUSED[machine].values())
    lines = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_GREATER_OR_EQUAL, len(refused) + 1, 0, _X32_CALLS),
    ]
    lines += [(_JUMP_IF_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def open_filter() -> int:
    """A descriptor that holds the filter, at its start."""
    return memory_file(filter_program())


def memory_file(content: bytes) -> int:
    """A descriptor of a nameless file with this content, at its start."""
    descriptor = os.memfd_create("strop-sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
