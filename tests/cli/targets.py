"""Defines kinds of targets of an output file.

One law holds for all: a command changes nothing in the target's folder but the contents of the file. Nodes,
modes, owners, links and other files stay, and no temporary file is left.
"""
import contextlib
import os
import socket
import stat
import subprocess
import threading
import typing

from command import as_user

BEFORE = "not gradwire's\n"
OTHER_USER = 12345  # a user and group without members


class Target(typing.NamedTuple):
    """A target, and the expected end of the command.

    Attributes:
        path: the name for the command.
        code, error: the exit code, and a part of the message.
        wrapper: words that precede the command; pass_fds: descriptors that the command inherits.
        contents: the file that is written, if not `path`. None: no file.
        read: (standard output) -> what was written; closes a reader.
        made: a file that appears.
        user: the command runs as another user.
    """
    path: typing.Any
    code: int = 0
    error: str = ""
    wrapper: tuple = ()
    pass_fds: tuple = ()
    contents: typing.Any = ""
    read: typing.Optional[typing.Callable] = None
    made: str = ""
    user: bool = False

    def written(self, stdout):
        if self.read is not None:
            return self.read(stdout)
        file = self.path if self.contents == "" else self.contents
        return None if file is None else file.read_text()


def snapshot(folder, target):
    """Returns each node: kind, mode, owner, links and, except for the file that is written, contents."""
    found, file = {}, target.path if target.contents == "" else target.contents
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = os.readlink(path) if path.is_symlink() else None
        is_file = file and os.path.exists(file) and os.path.samefile(path, file)
        if stat.S_ISREG(status.st_mode) and not is_file:
            text = path.read_text()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink,
                                                status.st_rdev, text)
    return found


def new(folder):
    return Target(folder / "out.json", made="out.json")


def long_name(folder):
    return Target(folder / ("n" * 250 + ".json"), made="n" * 250 + ".json")


def too_long_name(folder):
    return Target(folder / ("n" * 251 + ".json"), 2, "File name too long")


def no_folder(folder):
    return Target(folder / "nowhere" / "out.json", 2, "No such file or directory")


def plain(folder, mode=0o640, owner=None, **more):
    """A file of this user, or of another one."""
    path = folder / "out.json"
    path.write_text(BEFORE)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    return Target(path, **more)


def hard_linked(folder):
    os.link(plain(folder).path, folder / "other name")
    return Target(folder / "out.json")


def of_another_owner(folder):
    return plain(folder, owner=OTHER_USER)


def in_a_folder_of_another(folder, **more):
    """A file that this user may write, in a folder in which the user cannot create files."""
    return plain(folder, owner=OTHER_USER, user=True, wrapper=tuple(as_user(OTHER_USER, folder, top)), **more)


def read_only(folder):
    return in_a_folder_of_another(folder, mode=0o444, code=2, error="Permission denied", contents=None)


def link(folder):
    """A chain of links to a file. The first link is relative."""
    (folder / "inner").mkdir()
    file = plain(folder / "inner").path
    (folder / "second").symlink_to(file)
    (folder / "out.json").symlink_to("second")
    return Target(folder / "out.json")


def link_to_nothing(folder):
    (folder / "inner").mkdir()
    (folder / "out.json").symlink_to("inner/new.json")
    return Target(folder / "out.json", made="inner/new.json")


def next_to_temporaries(folder):
    """The command writes neither to nor through FILE.tmp, which belongs to another program."""
    (folder / "victim").write_text(BEFORE)
    (folder / "out.json.tmp").symlink_to("victim")
    return new(folder)


def node(folder, kind, major, minor, *expected):
    os.mknod(folder / "out.json", 0o666 | kind, os.makedev(major, minor))
    return Target(folder / "out.json", *expected, contents=None)


def device(folder):
    return node(folder, stat.S_IFCHR, 1, 3)  # /dev/null


def full_device(folder):
    return node(folder, stat.S_IFCHR, 1, 7, 1, "No space left on device")  # /dev/full


def disk(folder):
    return node(folder, stat.S_IFBLK, 7, 250, 2, "it is a disk")


def a_socket(folder):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(folder / "out.json"))
    return Target(folder / "out.json", 2, "it is a socket", contents=None)


def a_folder(folder):
    (folder / "out.json").mkdir()
    return Target(folder / "out.json", 2, "it is a folder", contents=None)


def fifo(folder):
    """A FIFO that the reader opens slightly later, like `cat FIFO` in another shell."""
    os.mkfifo(folder / "out.json")
    cat = subprocess.Popen(["sh", "-c", f"sleep 0.1; exec cat '{folder}/out.json'"], stdout=subprocess.PIPE,
                           text=True)
    return Target(folder / "out.json", contents=None, read=lambda _: cat.communicate(timeout=30)[0])


def process_substitution(folder):
    """A process substitution >(command): /dev/fd/N of a pipe, which a thread reads."""
    read, end = os.pipe()
    texts = []

    def collect():
        with os.fdopen(read) as file:
            texts.append(file.read())

    reader = threading.Thread(target=collect)
    reader.start()
    return Target(f"/dev/fd/{end}", pass_fds=(end,), contents=None,
                  read=lambda _: (os.close(end), reader.join(30), texts[0])[-1])


def read_only_descriptor(folder):
    descriptor = os.open("/dev/null", os.O_RDONLY)
    return Target(f"/dev/fd/{descriptor}", 2, "for reading only", pass_fds=(descriptor,), contents=None)


def closed_descriptor(folder):
    return Target("/dev/fd/777", 2, "777", contents=None)


def standard_output(folder):
    """A link like /dev/stdout. In the output, the contents follow the table."""
    (folder / "out.json").symlink_to("/proc/self/fd/1")
    return Target(folder / "out.json", contents=None, read=lambda stdout: stdout)


def standard_output_by_name(folder):
    """The file of `gradwire ... --json out.json > out.json`, which contains both texts in order."""
    path = folder / "out.json"
    path.touch()
    return Target(path, wrapper=("sh", "-c", f'exec "$@" >"{path}"', "sh"))


def bind_mount(folder):
    """The contents go to the source of the mount, not to the file below it."""
    (folder / "source").write_text(BEFORE)
    mount = f'mount --bind "{folder}/source" "{folder}/out.json"; exec "$@"'
    return plain(folder, wrapper=("unshare", "-m", "sh", "-ec", mount, "sh"), contents=folder / "source")


def full_disk(folder):
    """A file on a tmpfs without a free page, which keeps the old contents: at the end they are in `after`."""
    (folder / "disk").mkdir()
    path = folder / "disk/out.json"
    fill = (f'mount -t tmpfs -o size=64k none "{folder}/disk"; printf "%s" "{BEFORE}" >"{path}"; '
            f'cat /dev/zero >"{folder}/disk/zeros" 2>/dev/null || true; "$@" || code=$?; '
            f'cp "{path}" "{folder}/after"; exit ${{code:-0}}')
    return Target(path, 1, "No space left on device", ("unshare", "-m", "sh", "-ec", fill, "sh"),
                  made="after")


def file_size_limit(folder):
    """A file under `ulimit -f`. The command fails with an error and not by a signal."""
    return Target(folder / "out.json", 1, "File too large", ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh"))


top = None  # the parent of the programs' folder
NEED_ROOT = (of_another_owner, in_a_folder_of_another, read_only, device, full_device, disk, bind_mount,
             full_disk)
ALL = (new, long_name, too_long_name, no_folder, plain, hard_linked, link, link_to_nothing,
       next_to_temporaries, a_socket, a_folder, fifo, process_substitution, read_only_descriptor,
       closed_descriptor, standard_output, standard_output_by_name, file_size_limit, *NEED_ROOT)


def may_mount():
    if os.getuid() != 0:
        return False
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True,
                              check=False).returncode == 0
    return False
