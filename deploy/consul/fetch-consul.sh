#!/bin/sh
# Puts a Consul agent at TARGET, for development and tests, without root and without touching the system's packages.
#
#   deploy/consul/fetch-consul.sh [TARGET]        default: ${MESHFIRE_CACHE_DIR:-~/.cache/meshfire}/bin/consul
#
# Takes Debian 11's package (Consul 1.8.7, MPL-2.0) from the mirror that this machine's own apt uses, with a private copy
# of apt's state, and checks both apt's signature chain and the package's SHA-256. Works on Debian while its mirror still
# carries that suite; elsewhere it ends with status 3 and says what else to do.
set -eu

TARGET=${1:-${MESHFIRE_CACHE_DIR:-$HOME/.cache/meshfire}/bin/consul}
SUITE=bullseye
SHA256=e4e888bba104daba1d9161f49bfc52649a7e4efd45b1a7ead5bc54f2cb9c89d9

give_up() {
    echo "fetch-consul: $1" >&2
    echo "fetch-consul: install Consul by your system's means (https://developer.hashicorp.com/consul/install) and put it" >&2
    echo "on PATH, or name it in MESHFIRE_CONSUL_BIN. Without an agent, 'meshfire up' uses a file for discovery." >&2
    exit 3
}

# "URI KEYRING" of the machine's first Debian archive, from either form of apt's sources; KEYRING may be empty.
main_archive() {
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        awk 'BEGIN { RS = ""; FS = "\n" }
             { uri = key = ""
               for (i = 1; i <= NF; i++) {
                   if ($i ~ /^URIs:/)      { split($i, part, /[ \t]+/); uri = part[2] }
                   if ($i ~ /^Signed-By:/) { split($i, part, /[ \t]+/); key = part[2] } }
               if (uri ~ /\/debian\/?$/) { print uri, key; exit } }' "$file"
    done
    [ -r /etc/apt/sources.list ] && awk '$1 == "deb" {
        key = ""; at = 2
        if ($2 ~ /^\[/) { while ($at !~ /\]$/) at++; at++
            if (match($0, /signed-by=[^] ]+/)) key = substr($0, RSTART + 10, RLENGTH - 10) }
        if ($at ~ /\/debian\/?$/) { print $at, key; exit } }' /etc/apt/sources.list
    return 0
}

[ -x "$TARGET" ] && { echo "fetch-consul: $TARGET is already there"; exit 0; }
for tool in apt-get dpkg-deb sha256sum awk; do
    command -v "$tool" >/dev/null || give_up "no $tool: this is not a Debian system"
done
[ "$(dpkg --print-architecture)" = amd64 ] || give_up "the checked package is for amd64, this machine is not"

archive=$(main_archive | head -n 1)
uri=${archive%% *}
key=${archive#* }
[ -n "$uri" ] || give_up "apt's sources name no Debian archive"
[ -n "$key" ] || key=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$key" ] || give_up "the archive's keyring $key is not readable"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts" "$work/package"
echo "deb [arch=amd64 signed-by=$key] $uri $SUITE main" > "$work/sources.list"

private_apt() {
    apt-get -qq \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts="$work/parts" \
        -o Dir::Etc::preferencesparts="$work/parts" -o Dir::State::Lists="$work/lists" \
        -o Dir::State::status=/dev/null -o Dir::Cache="$work/cache" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=2 "$@"
}

private_apt update >"$work/log" 2>&1 || { cat "$work/log" >&2; give_up "apt cannot read the suite $SUITE"; }
(cd "$work" && private_apt download consul) >"$work/log" 2>&1 \
    || { cat "$work/log" >&2; give_up "the suite $SUITE has no consul package here"; }
deb=$(ls "$work"/consul_*.deb)
echo "$SHA256  $deb" | sha256sum --check --quiet - || give_up "the package does not have the expected SHA-256"

dpkg-deb -x "$deb" "$work/package"
mkdir -p "$(dirname "$TARGET")"
# Whole or not at all, also for someone who fetches at the same time.
install -m 755 "$work/package/usr/bin/consul" "$TARGET.$$"
mv "$TARGET.$$" "$TARGET"
echo "fetch-consul: $("$TARGET" version | head -n 1) at $TARGET"
