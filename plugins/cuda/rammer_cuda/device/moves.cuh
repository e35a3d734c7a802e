// What a repeated program moves between two turns: a row of blocks for each move of the table.
struct RmMove {
  char *target;
  const char *source;
  long long target_by, source_by, bytes;  // bytes further on in every turn
  long long when;                         // of which launches
};

template <typename T>
__device__ __forceinline__ void rm_move_as(char *target, const char *source, long long bytes) {
  const long long count = bytes / sizeof(T);
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x)
    reinterpret_cast<T *>(target)[i] = reinterpret_cast<const T *>(source)[i];
}

// Moves of a kind whose bit is in `whens`. Those behind a turn (bit 2) belong to the turn before `turn`.
extern "C" __global__ void rm_moves(const RmMove *table, int turn, int whens) {
  const RmMove move = table[blockIdx.y];
  if (!(move.when & whens)) return;
  const long long at = move.when == 4 ? turn - 1 : turn;
  char *target = move.target + at * move.target_by;
  const char *source = move.source + at * move.source_by;
  const unsigned long long places = (unsigned long long)target | (unsigned long long)source | (unsigned long long)move.bytes;
  if (places % 16 == 0)
    rm_move_as<int4>(target, source, move.bytes);
  else if (places % 4 == 0)
    rm_move_as<int>(target, source, move.bytes);
  else
    rm_move_as<char>(target, source, move.bytes);
}
