#!/usr/bin/env bash
# Runs README's two commands on a bare Debian, like a new user's machine, without files of this machine. CI
# does this for each change (.ci/run).
#
#   scripts/fresh_debian.sh [SUITE [USER [COMMAND...]]]
#   scripts/fresh_debian.sh --smoke     in this machine's system, with make --dry-run
#   scripts/fresh_debian.sh bookworm user "make demo" "sudo make test PART=root"
#
# SUITE is bookworm (the default) or trixie. USER is root, user (an ordinary user with sudo) or both (the
# default). COMMAND: by default "make demo" and "make test". Needs root, debootstrap and about 4 GB of
# temporary files per user.
#
# For each user, installs debootstrap's minbase, this machine's configuration of apt, make and git, clones
# HEAD, and runs each command in the clone. Only the commands install further packages. Tries three times to
# download Debian. Prints each command's time, last lines and exit status. Exits with 1 if a command failed or
# Debian could not be installed. Full output: build/fresh_debian/SUITE-USER-COMMAND.log. All runs of this
# machine share a compiler cache, gradwire/fresh-debian in ~/.cache.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
suite=${1:-bookworm} who=${2:-both}
shift $(($# < 2 ? $# : 2))
commands=("$@")
[ ${#commands[@]} -gt 0 ] || commands=("make demo" "make test")
case $suite in bookworm | trixie) ;; *) echo "fresh_debian: '$suite' is not a suite: bookworm or trixie" >&2; exit 2 ;; esac
case $who in root | user) users=("$who") ;; both) users=(root user) ;;
  *) echo "fresh_debian: '$who' must be root, user or both" >&2; exit 2 ;; esac
[ -z "$smoke" ] || [ "$(id -u)" -eq 0 ] || not_checked "mounts need root"
[ "$(id -u)" -eq 0 ] || { echo "fresh_debian: debootstrap and chroot need root" >&2; exit 2; }
if [ -z "$smoke" ] && ! command -v debootstrap > /dev/null; then
  echo "fresh_debian: needs debootstrap: apt-get install debootstrap" >&2
  exit 2
fi

# thrice COMMAND...: runs COMMAND up to three times, until it succeeds.
thrice() {
  local pause
  for pause in 10 60 ''; do
    "$@" > "$logs/download.log" 2>&1 && return
    [ -z "$pause" ] || { echo "fresh_debian: failed, trying again in $pause s: $*" >&2; sleep "$pause"; }
  done
  tail -5 "$logs/download.log" >&2
  echo "fresh_debian: failed three times: $*" >&2
  exit 1
}
install_base() {
  rm -rf "$base"
  timeout 900 debootstrap --variant=minbase --include=ca-certificates "$suite" "$base" "$mirror"
}
account=user$$  # a new name, because a smoke run has the accounts of this machine, perhaps a fresh Debian
minutes() { printf '%d:%02d min' $(($1 / 60)) $(($1 % 60)); }

logs=$PWD/$place/fresh_debian
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gradwire/fresh-debian
mkdir -p "$logs" "$cache"
chmod 777 "$cache"
top=$(mktemp -d -t fresh-debian.XXXXXX)
# The mounts are in a separate namespace and end with it, so no file of the machine is below this folder.
trap 'rm -rf --one-file-system "$top"' EXIT

base=$top/base
if [ -n "$smoke" ]; then
  mkdir -p "$base"/{etc/apt/apt.conf.d,etc/ssl/certs,etc/sudoers.d,proc,sys,dev,run,tmp,root,home,srv,usr}
  for folder in bin sbin lib lib64; do ln -s usr/$folder "$base/$folder"; done
  unshare --mount mount -t sysfs sys "$base/sys" 2> /dev/null || not_checked "this machine permits no mounts"
  cp -a /etc/{passwd,group,shadow,login.defs,alternatives,ld.so.cache} "$base/etc"
fi
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null |
  grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 | tr -d ' ' || true)
mirror=${mirror:-http://deb.debian.org/debian}
if [ -z "$smoke" ]; then
  echo "fresh_debian: $suite: debootstrap"
  thrice install_base
fi
cp -a /etc/apt/apt.conf.d/. "$base/etc/apt/apt.conf.d/"
cp /etc/resolv.conf "$base/etc/resolv.conf"
cp /etc/hosts "$base/etc/hosts"
cp /etc/ssl/certs/ca-certificates.crt "$base/etc/ssl/certs/"
{
  echo "deb $mirror $suite main"
  echo "deb $mirror $suite-updates main"
} > "$base/etc/apt/sources.list"
printf '%s\n' 'cache_dir = /srv/ccache' 'umask = 000' 'max_size = 2G' > "$base/etc/ccache.conf"

# inside FOLDER COMMAND...: runs COMMAND in the new system. COMMAND gets only the archive's settings from this
# machine's environment.
inside() {
  local folder=$1 name proxies=()
  shift
  mkdir -p "$folder/srv/ccache"
  for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY no_proxy; do
    [ -z "${!name:-}" ] || proxies+=("$name=${!name}")
  done
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child bash -ec '
    mount --make-rprivate /
    mount -t proc proc "$1/proc"
    mount -t sysfs sys "$1/sys"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs tmpfs "$1/run"
    mount --bind "$2" "$1/srv/ccache"
    [ -z "$3" ] || mount --rbind /usr "$1/usr"
    folder=$1
    shift 3
    # Mount the folder separately, because some tests change the propagation of mounts below /.
    mount --rbind "$folder" "$folder"
    exec chroot "$folder" "$@"' inside "$folder" "$cache" "$smoke" \
    /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb "${proxies[@]}" "$@"
}

git clone --quiet --bare . "$top/gradwire.git"
status=0
for user in "${users[@]}"; do
  folder=$top/$user
  cp -a "$base" "$folder"
  install=(make git)
  [ "$user" = root ] || install+=(sudo)
  [ -n "$smoke" ] || thrice inside "$folder" sh -ec 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" > /dev/null' \
    install "${install[@]}"
  cp -a "$top/gradwire.git" "$folder/srv/gradwire.git"
  if [ "$user" = root ]; then
    as=(sh -ec)
  else
    # Git refuses to clone a repository that belongs to another user.
    inside "$folder" sh -ec 'useradd --create-home $0 && echo "$0 ALL=(ALL) NOPASSWD: ALL" > /etc/sudoers.d/user &&
      chown -R $0 /srv/gradwire.git' "$account"
    as=(setpriv --reuid $account --regid $account --init-groups env HOME=/home/$account sh -ec)
  fi
  inside "$folder" "${as[@]}" 'cd && git clone --quiet /srv/gradwire.git gradwire'
  for name in "${commands[@]}"; do
    log=$logs/$suite-$user-${name//[^a-zA-Z]/-}.log
    begin=$SECONDS
    code=0
    inside "$folder" "${as[@]}" "cd && cd gradwire && exec $name ${smoke:+--dry-run}" > "$log" 2>&1 < /dev/null || code=$?
    echo "fresh_debian: $suite, $user: $name: exit status $code after $(minutes $((SECONDS - begin)))"
    grep -E '^setup: .*(could not|off:)' "$log" || true
    lines=8
    [ $code -eq 0 ] || status=1 lines=200
    grep -vE '^\[[0-9]+/[0-9]+\] ' "$log" | tail -n $lines | sed 's/^/    /' || true  # without ninja's steps
  done
  rm -rf --one-file-system "$folder"
done
exit $status
