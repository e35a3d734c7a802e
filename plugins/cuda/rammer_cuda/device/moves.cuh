// What a repeated program moves between two turns: a row of blocks for each move of the table.
struct RmMove {
  char *target;
  const char *source;
  long long target_by, source_by, bytes;  // bytes further on in every turn
  long long target_end, source_end;       // bytes up to the ends of their buffers, where the last slice may end
  long long when;                         // of which launches
};

template <typename T>
__device__ __forceinline__ void rm_move_as(char *target, const char *source, long long bytes) {
  const long long count = bytes / sizeof(T);
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x)
    reinterpret_cast<T *>(target)[i] = reinterpret_cast<const T *>(source)[i];
}

// Moves of a kind whose bit is in `whens`. Those behind a turn (bit 2) belong to the turn before `turn`.
// What goes backwards leaves out as many turns as are `skipped`.
extern "C" __global__ void rm_moves(const RmMove *table, int turn, int whens, int skipped) {
  const RmMove move = table[blockIdx.y];
  if (!(move.when & whens)) return;
  const long long at = move.when == 4 ? turn - 1 : turn;
  const long long to = (at + (move.target_by < 0 ? skipped : 0)) * move.target_by;
  const long long from = (at + (move.source_by < 0 ? skipped : 0)) * move.source_by;
  char *target = move.target + to;
  const char *source = move.source + from;
  const long long bytes = min(move.bytes, min(move.target_end - to, move.source_end - from));
  const unsigned long long places = (unsigned long long)target | (unsigned long long)source | (unsigned long long)bytes;
  if (places % 16 == 0)
    rm_move_as<int4>(target, source, bytes);
  else if (places % 4 == 0)
    rm_move_as<int>(target, source, bytes);
  else
    rm_move_as<char>(target, source, bytes);
}
