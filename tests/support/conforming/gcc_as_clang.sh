#!/bin/sh
# Run gcc in place of clang for the few programs without vectors that tinygrad's CPU device compiles at its start.
# gcc has no option --target, and its assembler cannot write to a pipe, so gcc writes a file. tinygrad's arguments end
# in `- -o -`; gcc obeys the last -o, which this script adds.
object=$(mktemp) || exit 1
trap 'rm -f "$object"' EXIT
for word; do
  shift
  case $word in
  --target=*) ;;
  *) set -- "$@" "$word" ;;
  esac
done
gcc "$@" -o "$object" && cat "$object"
