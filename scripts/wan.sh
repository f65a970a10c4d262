#!/usr/bin/env bash
# WAN in a box: islands and syncer shards in network namespaces, joined by slow and long links.
#
#   scripts/wan.sh [--config=configs/wan.py[:PRESET]] [--islands=M] [--shards=S] [--mbit=200]
#                  [--delay-ms=60] [--repeats=1] [--workdir=runs/wan] [--overwrite]
#                  [--config.FIELD=VALUE ...]
#
# --islands, --shards  how many; the config's numbers unless given
# --mbit               rate of every island's and every shard's link, each way (tc tbf on both ends)
# --delay-ms           ONE WAY between any two of them, so a round trip takes twice as long
# --repeats            runs, one after the other; several are in WORKDIR/1, WORKDIR/2, ...
# --workdir            of the run; one that holds a run is refused without --overwrite
# --config.FIELD       changes a field of the config, for all roles
#
# Every island and every shard is a namespace of its own behind a link of its own to one switch. The
# delay comes from scripts/proxy.py between an island, or a shard with copies for its buddy, and
# the switch (netem is missing in many kernels). The evaluator stands at the switch, without delay;
# with run.evaluations=0 it comes at the end, for the result. An island's XLA uses one thread. All
# processes live in namespaces that end with this script, also when it is killed, so that no process
# is left and several runs do not disturb each other.
#
# In the end a table shows the runs beside the figures of the planner and of a virtual run. Last line:
# JSON, see scripts/wan_summary.py. Exit status 77 (skipped): no right to make namespaces
# here, or no tc tbf in the kernel; 1: a role failed, whose log is shown. Logs: WORKDIR/logs.
# WAN_PYTHON names a Python that has ddiloco; without it .venv is made if it is missing.
set -euo pipefail

say() { printf '[wan] %s\n' "$*"; }
skip() { printf 'wan.sh: skipped: %s\n' "$*" >&2; exit 77; }
wrong() { printf 'wan.sh: %s\n' "$*" >&2; exit 2; }

self="$(realpath "$0")" given=("$@")
python="${WAN_PYTHON:-.venv/bin/python}"
inside=""
if [ "${1:-}" = "--inside" ]; then inside=1; shift; fi
config="" islands="" shards="" mbit=200 delay_ms=60 repeats=1 workdir="" overwrite=""
fields=()
for argument in "$@"; do
  value="${argument#*=}"
  case "$argument" in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$self"; exit 0 ;;
    --config=*) config="$(realpath -m "$value")" ;;
    --config.*=*) fields+=("$argument") ;;
    --islands=*) islands="$value" ;;
    --shards=*) shards="$value" ;;
    --mbit=*) mbit="$value" ;;
    --delay-ms=*) delay_ms="$value" ;;
    --repeats=*) repeats="$value" ;;
    --workdir=*) workdir="$(realpath -m "$value")" ;;
    --overwrite) overwrite=1 ;;
    *) wrong "$argument: is not an option. Fix: see scripts/wan.sh --help." ;;
  esac
done
number='^[1-9][0-9]?$'
[[ -z "$islands" || "$islands" =~ $number ]] || wrong "--islands=$islands: must be 1 to 99. Fix: use 2."
[[ -z "$shards" || "$shards" =~ $number ]] || wrong "--shards=$shards: must be 1 to 99. Fix: use 2."
[[ "$repeats" =~ $number ]] || wrong "--repeats=$repeats: must be 1 to 99. Fix: use 3."
[[ "$mbit" =~ ^[1-9][0-9]*$ ]] || wrong "--mbit=$mbit: must be a whole number above 0. Fix: use 200."
[[ "$delay_ms" =~ ^[0-9]+(\.[0-9]+)?$ ]] || wrong "--delay-ms=$delay_ms: must be a number. Fix: use 60."

if [ -z "$inside" ]; then
  # Makes the box. --pid: when its first process ends, the kernel ends all the others; setpriv and
  # --kill-child end that first process when this script ends, also by kill -9.
  for tool in unshare nsenter setpriv ip tc; do
    command -v "$tool" > /dev/null || skip "there is no $tool here (packages util-linux, iproute2)"
  done
  box=(unshare --net --pid --fork --kill-child --mount-proc)
  [ "$(id -u)" = 0 ] || box+=(--user --map-root-user)
  "${box[@]}" true 2> /dev/null || skip "making namespaces needs root, or user namespaces for all users"
  tbf="tc qdisc add dev lo root tbf rate 1mbit burst 10kb latency 1s"
  "${box[@]}" sh -c "ip link set lo up && $tbf" 2> /dev/null || skip "this kernel has no tc tbf"
  if [ -z "${WAN_PYTHON:-}" ] && [ ! -x "$(dirname "$self")/../.venv/bin/ddiloco" ]; then
    (. "$(dirname "$self")/venv.sh" "")
  fi
  trap 'kill -KILL "$child" 2> /dev/null || true' EXIT
  trap 'say "interrupted; ends all roles" >&2; exit 130' INT
  trap 'exit 143' TERM
  cd "$(dirname "$self")/.."
  workdir="${workdir:-$PWD/runs/wan}" workdirs=() child=""
  for ((run = 1; run <= repeats; run++)); do
    own="$workdir"
    [ "$repeats" = 1 ] || own="$workdir/$run"
    workdirs+=(--workdir="$own")
    ended=0
    setpriv --pdeathsig=KILL "${box[@]}" bash "$self" --inside "${given[@]}" --workdir="$own" \
      ${config:+--config="$config"} < /dev/null &
    child=$!
    wait "$child" || ended=$?
    child=""
    [ "$ended" = 0 ] || exit "$ended"
  done
  exec "$python" scripts/wan_summary.py "${workdirs[@]}" --mbit="$mbit" --delay_ms="$delay_ms"
fi

# From here on this is process 1 of the box, and its network namespace is the switch.
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$(dirname "$self")/.."
config="${config:-configs/wan.py}"
[ -z "$islands" ] || fields+=("--config.islands.num_learners=$islands")
[ -z "$shards" ] || fields+=("--config.sync.num_shards=$shards")
if [ -e "$workdir/config.json" ]; then
  [ -n "$overwrite" ] || wrong "--workdir=$workdir: already holds a run. Fix: choose another directory, or add --overwrite."
  "$python" -c '
import shutil, sys
from pathlib import Path
from ddiloco.workdir import left_by_a_run
for path in left_by_a_run(Path(sys.argv[1])):
  shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)' "$workdir"
fi
mkdir -p "$workdir/logs"

run=("$python" -m ddiloco)
role=(--config="$config" --workdir="$workdir" --keys="$workdir/keys" "${fields[@]}")
description="$("${run[@]}" train --dry_run --cpu --config="$config" --workdir="$workdir" "${fields[@]}")"
read -r islands shards evaluations < <("$python" -c '
import json, sys
config, _ = json.JSONDecoder().raw_decode(sys.stdin.read())
print(config["islands"]["num_learners"], config["sync"]["num_shards"], config["run"]["evaluations"])' <<< "$description")
for given in "islands $islands" "shards $shards"; do  # the config may say more than the flag allows
  [[ "${given#* }" =~ $number ]] || wrong "--${given/ /=}: must be 1 to 99, also in the config. Fix: use 2."
done
say "$islands islands and $shards shards, links of $mbit Mbit/s and $delay_ms ms one way"
grep -E '^(model|run|traffic):' <<< "$description" | sed 's/^/[wan] /'
"${run[@]}" keys --keys="$workdir/keys" --learners="$islands" --shards="$shards" > "$workdir/logs/keys.log"

# --- the network ----------------------------------------------------------------------------------

ip link set lo up
ip link add switch type bridge
ip address add 10.0.0.1/16 dev switch
ip link set switch up

island_address() { echo "10.0.1.$((1 + $1))"; }
shard_address() { echo "10.0.2.$((1 + $1))"; }

declare -A holder  # the process that keeps a node's network namespace
shape() { tc qdisc add dev "$1" root tbf rate "${mbit}mbit" burst 128kb latency 100ms; }
node() {  # NAME ADDRESS: a namespace with a link to the switch
  unshare --net sleep infinity &
  holder[$1]=$!
  until [ "$(readlink "/proc/$!/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
  ip link add "to-$1" type veth peer name wan netns "$!"
  ip link set "to-$1" master switch up
  shape "to-$1"
  at "$1" ip link set lo up
  at "$1" ip address add "$2/16" dev wan
  at "$1" ip link set wan up
  mbit="$mbit" at "$1" bash -c "$(declare -f shape); shape wan"
}
at() { nsenter --target "${holder[$1]}" --net "${@:2}"; }  # NODE COMMAND...

declare -A name_of  # of the roles that run, by process
start() {  # ROLE COMMAND...: in the background, with its log
  "${@:2}" > "$workdir/logs/$1.log" 2>&1 &
  name_of[$!]="$1"
}

lag() {  # NODE SHARD: a delayed way from the node to the shard
  at "$1" "$python" scripts/proxy.py --delay_ms="$delay_ms" \
    --listen="127.0.0.1:$((7000 + 10 * $2))" --to="$(shard_address "$2"):7000" \
    > "$workdir/logs/link-$1-$2.log" 2>&1 &
}

direct="" delayed=""
for ((s = 0; s < shards; s++)); do
  node "shard$s" "$(shard_address "$s")"
  direct+="${direct:+,}tcp://$(shard_address "$s"):7000"
  delayed+="${delayed:+,}tcp://127.0.0.1:$((7000 + 10 * s))"
done
for ((m = 0; m < islands; m++)); do
  node "island$m" "$(island_address "$m")"
  for ((s = 0; s < shards; s++)); do
    lag "island$m" "$s"
  done
done
for ((s = 0; s < shards; s++)); do
  lag "shard$s" "$(((s + 1) % shards))"
done

# --- the roles ------------------------------------------------------------------------------------

for ((s = 0; s < shards; s++)); do
  # A shard dials only its buddy, by the delayed way; --bind is its own address.
  start "syncer-$s" at "shard$s" "${run[@]}" syncer "${role[@]}" --shard="$s" --syncers="$delayed" \
    --bind="tcp://$(shard_address "$s"):7000"
done
evaluate() { start evaluator "${run[@]}" evaluator "${role[@]}" --syncers="$direct"; }
[ "$evaluations" = 0 ] || evaluate
flags="${XLA_FLAGS:-} --xla_cpu_multi_thread_eigen=false"
for ((m = 0; m < islands; m++)); do
  start "learner-$m" at "island$m" env NPROC=1 XLA_FLAGS="$flags" "${run[@]}" learner "${role[@]}" \
    --cpu --learner="$m" --syncers="$delayed"
done
say "all roles are started; their logs are in $workdir/logs"
before=""
while sleep 10; do
  now="$(tail -qn 1 "$workdir"/logs/learner-*.log)"
  [ "$now" = "$before" ] || sed 's/^/[wan] /' <<< "$now"
  before="$now"
done &

while [ "${#name_of[@]}" -gt 0 ]; do
  status=0
  wait -n -p finished "${!name_of[@]}" || status=$?
  name="${name_of[$finished]}"
  unset "name_of[$finished]"
  if [ "$status" != 0 ]; then
    say "$name ended with status $status; the end of $workdir/logs/$name.log:" >&2
    tail -n 25 "$workdir/logs/$name.log" >&2
    exit 1
  fi
  say "$name has finished"
  # Without evaluations nothing receives what islands do not; the shards keep the model for the end.
  [ "$evaluations/$name" != 0/learner-0 ] || evaluate
done
"${run[@]}" report --workdir="$workdir"
