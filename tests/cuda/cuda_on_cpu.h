// The part of CUDA C++ that decode attention is written in, for g++: one program runs after the other on the CPU.
//
// Each thread of a program has a stack of its own. They take turns in one thread of the host: a thread runs until its
// next collective or barrier, then the next thread runs. A collective of a warp must be reached by all its lanes at once;
// anything else ends the process with a message.
//
// Shared memory that a kernel declares is `static`, and keeps what the program before left there. Asynchronous copies
// arrive when they are awaited, and not earlier. Dynamic shared memory is full of NaN in each dtype before a program.

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static int2 make_int2(int x, int y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static void require(bool is_so, const char *law) {
  if (is_so) return;
  fprintf(stderr, "cuda_on_cpu.h: %s\n", law);
  abort();
}

// Threads of a program.
constexpr int MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

struct Index { u32 x; };
static Index threadIdx, blockIdx;

struct Thread {
  ucontext_t start;
  jmp_buf turn;
  std::unique_ptr<char[]> stack;
  bool has_started, has_ended;
  u32 num_collectives;
};
static Thread threads[MOST_THREADS];
static jmp_buf scheduler;
static std::function<void()> program;
static int num_threads, num_running, num_waiting, num_barriers;

__attribute__((noinline)) static void let_others_run() {
  const u32 own = threadIdx.x;
  if (!_setjmp(threads[own].turn)) _longjmp(scheduler, 1);
}
static void run_thread() {
  program();
  threads[threadIdx.x].has_ended = true;
  --num_running;
  _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void run_until_it_waits(u32 index) {
  Thread &thread = threads[index];
  threadIdx.x = index;
  if (_setjmp(scheduler)) return;
  if (thread.has_started) _longjmp(thread.turn, 1);
  thread.has_started = true;
  setcontext(&thread.start);
}
static void start_thread(Thread &thread) {
  if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.get();
  thread.start.uc_stack.ss_size = STACK_BYTES;
  makecontext(&thread.start, run_thread, 0);
  thread.has_started = thread.has_ended = false;
  thread.num_collectives = 0;
}
static void run_program(int count) {
  require(count <= MOST_THREADS, "a program has more threads than a multiprocessor");
  num_threads = num_running = count;
  num_waiting = 0;
  for (int i = 0; i < count; ++i) start_thread(threads[i]);
  while (num_running) {
    for (int i = 0; i < count; ++i)
      if (!threads[i].has_ended) run_until_it_waits(i);
    // Threads that have ended do not hold up a barrier.
    if (num_waiting == num_running) {
      num_waiting = 0;
      ++num_barriers;
    }
  }
}

// Barriers of a program.
static void __syncthreads() {
  const int before = num_barriers;
  ++num_waiting;
  while (num_barriers == before) let_others_run();
}
static int __syncthreads_or(int is_so) {
  static int found;
  __syncthreads();
  found |= is_so != 0;
  __syncthreads();
  const int result = found;
  __syncthreads();
  found = 0;
  return result;
}

// Collectives of a warp. A lane leaves its part in a slot, lets the others run, and then reads their parts. The slots
// of two collectives alternate, since a lane may reach the next one before another has read.
struct Slot {
  u32 number;  // of the collective
  u64 bits;
  float left[2][4], right[4];  // operands of an MMA: 2 rows and a column, 4 of K each
};
static Slot slots[2][MOST_THREADS];

static Slot &own_slot() { return slots[threads[threadIdx.x].num_collectives % 2][threadIdx.x]; }
// Returns the slots of the warp's lanes.
static const Slot *exchange() {
  const u32 number = threads[threadIdx.x].num_collectives++;
  const int first = threadIdx.x / LANES * LANES;
  slots[number % 2][threadIdx.x].number = number;
  let_others_run();
  const Slot *lanes = slots[number % 2] + first;
  // Each lane checks its neighbour, so that together they check all.
  require(lanes[(threadIdx.x + 1) % LANES].number == number, "lanes of a warp are at different collectives");
  return lanes;
}
template <class Type> static const Slot *exchange(Type x) {
  Slot &slot = own_slot();
  slot.bits = 0;
  memcpy(&slot.bits, &x, sizeof x);
  return exchange();
}
template <class Type> static Type value(const Slot &slot) {
  Type x;
  memcpy(&x, &slot.bits, sizeof x);
  return x;
}
template <class Type> static Type __shfl_sync(u32, Type x, int lane) {
  const Slot *lanes = exchange(x);
  return value<Type>(lanes[lane % LANES]);
}
template <class Type> static Type __shfl_xor_sync(u32, Type x, int mask) {
  const Slot *lanes = exchange(x);
  return value<Type>(lanes[threadIdx.x % LANES ^ mask]);
}
template <class Type> static Type __shfl_up_sync(u32, Type x, int apart) {
  const Slot *lanes = exchange(x);
  const int lane = threadIdx.x % LANES;
  return value<Type>(lanes[lane >= apart ? lane - apart : lane]);
}
static u32 __ballot_sync(u32, bool is_so) {
  const Slot *lanes = exchange(is_so);
  u32 votes = 0;
  for (int lane = 0; lane < LANES; ++lane) votes |= (u32)value<bool>(lanes[lane]) << lane;
  return votes;
}
static bool __any_sync(u32, bool is_so) { return __ballot_sync(~0u, is_so) != 0; }
static int __reduce_add_sync(u32, int x) {
  const Slot *lanes = exchange(x);
  int sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += value<int>(lanes[lane]);
  return sum;
}
static int __reduce_max_sync(u32, int x) {
  const Slot *lanes = exchange(x);
  int most = x;
  for (int lane = 0; lane < LANES; ++lane) most = value<int>(lanes[lane]) > most ? value<int>(lanes[lane]) : most;
  return most;
}
static void __syncwarp() { exchange(0); }

// Atomics: no other thread runs meanwhile.
static u64 atomicCAS(u64 *at, u64 expected, u64 desired) {
  const u64 before = *at;
  if (before == expected) *at = desired;
  return before;
}
static int atomicMin(int *at, int x) {
  const int before = *at;
  if (x < before) *at = x;
  return before;
}
static int atomicAdd(int *at, int x) {
  const int before = *at;
  *at += x;
  return before;
}

// Numbers and bits.
static int min(int a, int b) { return a < b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static int __ffs(int x) { return __builtin_ffs(x); }
template <class To, class From> static To bit_cast(From x) {  // std::bit_cast needs C++20
  static_assert(sizeof(To) == sizeof(From));
  To same_bits;
  memcpy(&same_bits, &x, sizeof x);
  return same_bits;
}
static u32 __float_as_uint(float x) { return bit_cast<u32>(x); }
static float __uint_as_float(u32 bits) { return bit_cast<float>(bits); }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = (u64)high << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
static u16 float16_bits(float x) { return bit_cast<u16>((_Float16)x); }
static float from_float16(u16 bits) { return bit_cast<_Float16>(bits); }
static u16 bfloat16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float from_bfloat16(u16 bits) { return __uint_as_float((u32)bits << 16); }
static float from_e4m3(u8 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = (bits & 0x7F) == 0x7F ? NAN
                     : exponent            ? ldexpf(8 + mantissa, exponent - 10)
                                           : ldexpf(mantissa, -9);
  return bits & 0x80 ? -size : size;
}

// Global memory.
template <class Type> static Type __ldcg(const Type *at) { return *at; }

// Dynamic shared memory, whose addresses begin at 0, and copies to it.
alignas(16) static u8 dynamic_memory[256 * 1024];
static u32 dynamic_bytes;

struct Copy {
  u32 to;
  const u8 *from;
  bool is_there;
};
static std::vector<Copy> open_copies[MOST_THREADS];
static std::vector<std::vector<Copy>> copies[MOST_THREADS];  // groups that have not arrived

static u8 *shared_at(u32 at) {
  require(at % 16 == 0 && at + 16 <= dynamic_bytes, "an address is not in the program's shared memory");
  return dynamic_memory + at;
}
static void copy_async(u32 to, const u8 *from, bool is_there) {
  shared_at(to);
  open_copies[threadIdx.x].push_back({to, from, is_there});
}
static void commit_copies() {
  copies[threadIdx.x].push_back(std::move(open_copies[threadIdx.x]));
  open_copies[threadIdx.x].clear();
}
template <int MOST> static void await_copies() {
  auto &groups = copies[threadIdx.x];
  while ((int)groups.size() > MOST) {
    for (const Copy &copy : groups.front()) {
      if (copy.is_there) memcpy(shared_at(copy.to), copy.from, 16);
      else memset(shared_at(copy.to), 0, 16);
    }
    groups.erase(groups.begin());
  }
}

// Launches as the driver does: `arguments` has the address of each. The programs run in `order`. Returns whether the
// kernel has as many arguments.
template <class... Types, size_t... INDEX>
static void call(void (*kernel)(Types...), void **arguments, std::index_sequence<INDEX...>) {
  kernel(*(Types *)arguments[INDEX]...);
}
template <class... Types>
static bool launch(void (*kernel)(Types...), const int *order, int num_programs, int count, u32 shared_bytes,
                   void **arguments, int num_arguments) {
  if (num_arguments != sizeof...(Types)) return false;
  require(shared_bytes <= sizeof dynamic_memory, "a program has more shared memory than a multiprocessor");
  dynamic_bytes = shared_bytes;
  program = [=] { call(kernel, arguments, std::index_sequence_for<Types...>()); };
  for (int i = 0; i < num_programs; ++i) {
    blockIdx.x = order[i];
    memset(dynamic_memory, 0xFF, shared_bytes);
    for (int thread = 0; thread < count; ++thread) {
      open_copies[thread].clear();
      copies[thread].clear();
    }
    run_program(count);
  }
  return true;
}
