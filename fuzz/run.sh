#!/bin/sh
# run.sh SECONDS [TARGET...]: builds the fuzz targets on the stable toolchain and runs each for so long.
set -eu
cd "$(dirname "$0")"
seconds=${1:?usage: run.sh SECONDS [TARGET...]}
shift
[ $# -gt 0 ] || set -- event block file note disk memory kernel
flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
for part in inline-8bit-counters pc-table trace-compares; do flags="$flags -Cllvm-args=-sanitizer-coverage-$part"; done
RUSTFLAGS="$flags" "${CARGO:-cargo}" build --release --target x86_64-unknown-linux-gnu
for target in "$@"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    "target/x86_64-unknown-linux-gnu/release/$target" "corpus/$target" $( [ -d "seeds/$target" ] && echo "seeds/$target" ) \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target/" 2>"artifacts/$target.log" || { tail -20 "artifacts/$target.log"; exit 1; }
    echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "artifacts/$target.log") executions in $seconds s"
done
