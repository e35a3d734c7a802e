"""The shared-memory form of an operand for each instruction of tensor cores."""

from __future__ import annotations

from rammer.codegen.products import Cores, Rows, Staging, Turned

#: For tensor cores that read words; for constants that ldmatrix reads as words; for constants of warpgroups.
WORDS = Staging("float32", Rows(True), Rows(True, 4), Rows(True))
TF32_WORDS = Staging("tf32", Rows(True), Rows(True, 4), Rows(True))
TF32_TURNED = Staging("tf32", Turned(4), Rows(True, 4), Rows(True))
FLOAT32_CORES = Staging("float32", Cores(4), Rows(least=4), Rows())
TF32_CORES = Staging("tf32", Cores(4), Rows(least=4), Rows())
#: For ldmatrix, and for core matrices of any operand. Eight threads write one core matrix, so they write to different banks.
HALVES = Staging("float16", Rows(True), Turned(8), Rows(True), 8)
HALF_CORES = Staging("float16", Cores(8), Cores(8), Cores(8, across=True), 8, 8, True)
#: Bytes: tensor cores need four products of an element in one register, whatever the operand's layout.
BYTES = Staging("int8", Turned(16), Turned(16), Turned(16), 16, 4, across=False)
BYTE_CORES = Staging("int8", Cores(16), Cores(16), Cores(16), 16, 8, True, across=False)
