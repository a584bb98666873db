#!/bin/sh
# gcc in clang's place, for the few programs without vectors that tinygrad's CPU device starts by: gcc knows no
# --target, and its assembler writes to no pipe. `... - -o -`: the later -o is the one that counts.
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
