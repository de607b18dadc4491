// What a later product reads (next_weights.py): a program's part begins with the group of tiles that its cluster has
// first, and there with its share of a row. Without rows it asks for nothing.
struct NextWeight {
  const unsigned char *values;
  long long bytes, group_bytes;
  int tiles, tiles_of_group, clusters, parts, pitch, rows, length;
};
struct NextWeights { NextWeight weights[2]; };

// A warp's share of what this program asks for, to come into the L2 cache; it waits for nothing.
__device__ __forceinline__ void ask_for(const NextWeight &next, int warp, int warps) {
  constexpr int CHUNK = ASK_CHUNK;
  const int cluster = blockIdx.x / max(1, next.parts), chunks = (next.length + CHUNK - 1) / CHUNK;
  if (cluster >= next.clusters) return;
  const int group = ((long long)next.tiles * cluster / next.clusters + next.tiles_of_group - 1) / next.tiles_of_group;
  const long long begin = group * next.group_bytes + blockIdx.x % next.parts * (next.pitch / next.parts);
  for (int i = warp; i < next.rows * chunks; i += warps) {
    const int at = i % chunks * CHUNK, bytes = min(CHUNK, next.length - at);
    const long long place = begin + (long long)(i / chunks) * next.pitch + at;
    if (place + bytes > next.bytes) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next.values + place), "r"(bytes) : "memory");
  }
}
__device__ __noinline__ void ask_for(const NextWeights &next, int warp, int warps) {
  for (int i = 0; i < 2; ++i) ask_for(next.weights[i], warp, warps);
}
