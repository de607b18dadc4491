// Attention within images: each patch of an image sees all of it.
//
// Constants of the host, beside those of hopper_attention.cu: WIDTH, the dims of a head. TMA fills the rest of DIMS and
// of the last span with zeros.

struct Images {
  static constexpr int GROUP = 1, HEAD_DIM = WIDTH, TOKENS = ROWS;
  static constexpr float value_scale = 1;

  const int4 *tiles;  // first row of the image, first row of the tile, rows left from there, rows of the image
  int num_tiles, num_heads;

  struct Item {
    int head, begin, first_row, num_tokens, end;
    __device__ Item(const Images &params, int index) {
      const int4 tile = params.tiles[index % params.num_tiles];
      head = index / params.num_tiles;
      begin = tile.x;
      first_row = tile.y;
      num_tokens = min(tile.z, TOKENS);
      end = tile.w;
    }
    // The last column that a row sees, and the number of tiles of columns that all rows see.
    __device__ int position(int) const { return end - 1; }
    __device__ int whole() const { return end / COLUMNS; }
  };

  struct Source {
    int head, begin;
    __device__ Source(const Images &, const Item &item) : head(item.head), begin(item.begin) {}
    __device__ void load_tile(u32 to, const TensorMap &map, u32 barrier, int n) {
      if (threadIdx.x > 0) return;
      expect_bytes(barrier, TILE_BYTES);
      for (int part = 0; part < PARTS; ++part)
        tma_load(to + part * TILE_PART, map, barrier, part * SPAN / 2, head, begin + n * COLUMNS);
    }
  };
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_images(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map,
              const int4 *tiles, int num_tiles, int num_heads, unsigned short *out, u32 *counters, float factor) {
  attend(q_map, k_map, v_map, Images{tiles, num_tiles, num_heads}, out, counters, factor);
}
