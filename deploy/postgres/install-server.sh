#!/usr/bin/env bash
# Installs a PostgreSQL server for tests from Debian's packages, without starting one: tests run private servers.
set -euo pipefail
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "needs root and apt-get" >&2; exit 1; }
mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] || echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y postgresql >/dev/null
