"""Defines kinds of targets of an output file: the setup of each kind, and the expected state after the
command."""
import contextlib
import os
import pathlib
import socket
import stat
import subprocess
import threading

from command import as_user

BEFORE = "not gradwire's\n"
OTHER_USER = 12345  # a user and group without members


class Target:
    """A target with a name in `folder`. Subclasses define the target's kind and the command's exit code, and
    check the result."""
    code = 0
    needs_root = False
    wrapper = ()  # words that precede the command
    pass_fds = ()
    top = pathlib.Path()  # the parent of the programs' folder

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / "out.json"
        self.error = None  # a part of the expected error message
        self.prepare()

    def prepare(self):
        """Creates the target."""

    def written(self, _stdout):
        """Closes the reader, if any. Returns the written text."""
        return self.path.read_text()

    def check(self, test):
        """Checks the kind of node, the owner, the mode and the links."""


class New(Target):
    def check(self, test):
        test.assertTrue(stat.S_ISREG(self.path.lstat().st_mode))


class LongName(New):
    def prepare(self):
        self.path = self.folder / ("n" * 250 + ".json")


class TooLongName(Target):
    code, error = 2, "File name too long"

    def prepare(self):
        self.path, self.error = self.folder / ("n" * 251 + ".json"), "File name too long"


class Plain(Target):
    """A file of this user. The command replaces the contents and keeps the mode."""
    mode, owner, links = 0o640, os.getuid(), 1

    def prepare(self):
        self.path.write_text(BEFORE)
        self.path.chmod(self.mode)
        self.inode = self.path.stat().st_ino

    def check(self, test):
        status = self.path.lstat()
        test.assertTrue(stat.S_ISREG(status.st_mode))
        test.assertEqual((stat.S_IMODE(status.st_mode), status.st_uid, status.st_nlink),
                         (self.mode, self.owner, self.links))


class HardLinked(Plain):
    links = 2

    def prepare(self):
        super().prepare()
        os.link(self.path, self.folder / "other name")

    def check(self, test):
        super().check(test)
        test.assertTrue(os.path.samefile(self.path, self.folder / "other name"))


class OfAnotherOwner(Plain):
    owner, needs_root = OTHER_USER, True

    def prepare(self):
        super().prepare()
        os.chown(self.path, OTHER_USER, OTHER_USER)

    def check(self, test):
        super().check(test)
        test.assertEqual((self.path.stat().st_gid, self.path.stat().st_ino), (OTHER_USER, self.inode))


class Link(Plain):
    """A chain of links to a file. The first link is relative."""

    def prepare(self):
        (self.folder / "inner").mkdir()
        self.path = self.folder / "inner" / "target.json"
        super().prepare()
        (self.folder / "second").symlink_to(self.path)
        self.path = self.folder / "out.json"
        self.path.symlink_to("second")

    def check(self, test):
        test.assertEqual(os.readlink(self.path), "second")
        test.assertEqual(os.readlink(self.folder / "second"), str(self.folder / "inner" / "target.json"))
        self.path = self.folder / "inner" / "target.json"
        super().check(test)


class LinkToNothing(Target):
    def prepare(self):
        (self.folder / "inner").mkdir()
        self.path.symlink_to("inner/new.json")

    def check(self, test):
        test.assertEqual(os.readlink(self.path), "inner/new.json")
        test.assertTrue(stat.S_ISREG((self.folder / "inner" / "new.json").lstat().st_mode))


class BesideTemporaries(Target):
    """A file next to FILE.tmp and FILE.PID, which belong to another user. The command writes neither to nor
    through these files."""

    def prepare(self):
        (self.folder / "victim").write_text(BEFORE)
        (self.folder / "out.json.tmp").symlink_to("victim")

    def check(self, test):
        test.assertEqual((self.folder / "victim").read_text(), BEFORE)
        test.assertEqual(os.readlink(self.folder / "out.json.tmp"), "victim")
        test.assertTrue(stat.S_ISREG(self.path.lstat().st_mode))


class Device(Target):
    needs_root, number = True, os.makedev(1, 3)  # /dev/null

    def prepare(self):
        os.mknod(self.path, 0o666 | stat.S_IFCHR, self.number)

    def written(self, _stdout):
        return None

    def check(self, test):
        status = self.path.lstat()
        test.assertTrue(stat.S_ISCHR(status.st_mode) and status.st_rdev == self.number)
        test.assertEqual(os.listdir(self.folder), ["out.json"])  # the command left no other file


class FullDevice(Device):
    code, number = 1, os.makedev(1, 7)  # /dev/full

    def prepare(self):
        super().prepare()
        self.error = "No space left on device"


class Disk(Target):
    needs_root, code = True, 2

    def prepare(self):
        os.mknod(self.path, 0o666 | stat.S_IFBLK, os.makedev(7, 250))
        self.error = "it is a disk"

    def check(self, test):
        test.assertTrue(stat.S_ISBLK(self.path.lstat().st_mode))


class Socket(Target):
    code = 2

    def prepare(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(os.path.relpath(self.path))
        self.error = "it is a socket"

    def check(self, test):
        self.socket.close()
        test.assertTrue(stat.S_ISSOCK(self.path.lstat().st_mode))


class Folder(Target):
    code = 2

    def prepare(self):
        self.path.mkdir()
        self.error = "it is a folder"


class NoFolder(Target):
    code = 2

    def prepare(self):
        self.path, self.error = self.folder / "nowhere" / "out.json", "No such file or directory"


class Reader:
    """Reads a descriptor to its end in a thread."""

    def __init__(self, descriptor):
        self.text = b""
        self.thread = threading.Thread(target=self.read, args=(descriptor,))
        self.thread.start()

    def read(self, descriptor):
        with os.fdopen(descriptor, "rb") as file:
            self.text = file.read()

    def get(self):
        self.thread.join(30)
        return self.text.decode()


class Fifo(Target):
    """A FIFO that the reader opens slightly later, like `cat FIFO` in another shell."""

    def prepare(self):
        os.mkfifo(self.path)
        self.cat = subprocess.Popen(["sh", "-c", f"sleep 0.1; exec cat '{self.path}'"],
                                    stdout=subprocess.PIPE, text=True)

    def written(self, _stdout):
        return self.cat.communicate(timeout=30)[0]

    def check(self, test):
        test.assertTrue(stat.S_ISFIFO(self.path.lstat().st_mode))


class ProcessSubstitution(Target):
    """A process substitution >(command): /dev/fd/N of a pipe."""

    def prepare(self):
        read, self.end = os.pipe()
        self.reader, self.path, self.pass_fds = Reader(read), f"/dev/fd/{self.end}", (self.end,)

    def written(self, _stdout):
        os.close(self.end)
        return self.reader.get()


class ReadOnlyDescriptor(Target):
    code = 2

    def prepare(self):
        self.file = open("/dev/null", encoding="ascii")
        self.path, self.pass_fds = f"/dev/fd/{self.file.fileno()}", (self.file.fileno(),)
        self.error = "for reading only"

    def check(self, _test):
        self.file.close()


class ClosedDescriptor(Target):
    code = 2

    def prepare(self):
        self.path, self.error = "/dev/fd/777", "777"


class StandardOutput(Target):
    """A link like /dev/stdout. In the output, the contents follow the table."""

    def prepare(self):
        self.path.symlink_to("/proc/self/fd/1")

    def written(self, stdout):
        return stdout

    def check(self, test):
        test.assertEqual(os.readlink(self.path), "/proc/self/fd/1")


class StandardOutputByName(Target):
    """The file of `gradwire ... --json out.json > out.json`, which contains both texts in order."""

    def prepare(self):
        self.path.touch()
        self.wrapper = ("sh", "-c", f'exec "$@" >"{self.path}"', "sh")

    def check(self, test):
        test.assertIn("two_shot", self.path.read_text())


class BindMount(Plain):
    needs_root = True

    def prepare(self):
        super().prepare()
        self.source = self.folder / "source"
        self.source.write_text(BEFORE)
        self.wrapper = ("unshare", "-m", "sh", "-ec",
                        f'mount --bind "{self.source}" "{self.path}"; exec "$@"', "sh")

    def written(self, _stdout):
        return self.source.read_text()

    def check(self, test):
        super().check(test)
        test.assertEqual(self.path.read_text(), BEFORE)  # the file below the mount


class InAFolderOfAnother(Plain):
    """A file that this user may write, in a folder in which the user cannot create files."""
    needs_root, owner = True, OTHER_USER

    def prepare(self):
        super().prepare()
        os.chown(self.path, OTHER_USER, OTHER_USER)
        self.wrapper = as_user(OTHER_USER, self.folder, self.top)


class ReadOnly(InAFolderOfAnother):
    mode, code = 0o444, 2

    def prepare(self):
        super().prepare()
        self.error = "Permission denied"

    def check(self, test):
        super().check(test)
        test.assertEqual(self.path.read_text(), BEFORE)


class FullDisk(Plain):
    """A file on a tmpfs without a free page. The command keeps the old contents."""
    needs_root, code = True, 1

    def prepare(self):
        (self.folder / "disk").mkdir()
        self.path = self.folder / "disk" / "out.json"
        fill = (
            f'mount -t tmpfs -o size=64k none "{self.folder}/disk"; printf "%s" "{BEFORE}" >"{self.path}"; '
            f'chmod 640 "{self.path}"; cat /dev/zero >"{self.folder}/disk/zeros" 2>/dev/null || true; '
            f'"$@" || code=$?; cp "{self.path}" "{self.folder}/after"; exit ${{code:-0}}')
        self.wrapper = ("unshare", "-m", "sh", "-ec", fill, "sh")
        self.error = "No space left on device"

    def check(self, test):
        test.assertEqual((self.folder / "after").read_text(), BEFORE.strip() + "\n")


class FileSizeLimit(Target):
    """A file under `ulimit -f`. The command fails with an error and not by a signal."""
    code = 1

    def prepare(self):
        self.error = "File too large"
        self.wrapper = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh")

    def check(self, test):
        test.assertEqual(os.listdir(self.folder), [])


def all_targets():
    def below(cls):
        return [cls, *(c for sub in cls.__subclasses__() for c in below(sub))]
    return below(Target)[1:]


def may_mount():
    if os.getuid() != 0:
        return False
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True,
                              check=False).returncode == 0
    return False
