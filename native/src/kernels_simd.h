// The vector kernels, for any width: included by one source file per instruction set, which is compiled for that set
// and says, before it includes this, what a vector is:
//
//   kWidth          floats in a vector: 4, 8 or 16
//   F32, I32, U32   vectors, as GCC and Clang have them
//   fma(a, b, c)    a * b + c, rounded once or twice
//   bytes(p)        kWidth bytes as integers
//   eights(a, b, i, v)  in an array of vectors: lanes i … i + 3 become a, the four after them b
//
// Everything lies in the including file's unnamed namespace and calls no inline function of the standard library: the
// linker keeps one copy of those, and must not keep one that was compiled for instructions the processor lacks.
#include <cstring>
#include <utility>

#include "kernels.h"

namespace sparkle {
namespace {

constexpr int kUnit = kWidth < 8 ? 8 : kWidth;    // values unpacked at once: whole bytes at any number of bits
constexpr int kVectors = kUnit / kWidth;          // of a unit
constexpr int kLineBytes = 64;                    // of a cache
constexpr int kRowBlock = 32;                     // rows that stay in the second-level cache while weights stream by

inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

inline F32 all(float x) { return F32{} + x; }

inline float add_lanes(F32 v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int n = kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

// kBits bytes: eight values.
template <int kBits>
inline std::uint64_t eight(const std::uint8_t* p) {
  std::uint16_t half = 0;
  std::uint32_t word = 0;
  if constexpr (kBits == 2 || kBits == 3) {
    std::memcpy(&half, p, sizeof half);
    return kBits == 2 ? half : half | static_cast<std::uint32_t>(p[2]) << 16;
  } else {
    std::memcpy(&word, p, sizeof word);
    if constexpr (kBits == 4) return word;
    if constexpr (kBits == 5) return word | static_cast<std::uint64_t>(p[4]) << 32;
    std::memcpy(&half, p + 4, sizeof half);
    return word | static_cast<std::uint64_t>(half) << 32;
  }
}

template <int kBits, int kPeriod, int... i>
inline U32 shifts(std::integer_sequence<int, i...>) {
  return U32{static_cast<std::uint32_t>(i % kPeriod * kBits)...};
}

// The next kUnit values, in order.
template <int kBits>
inline void unpack(const std::uint8_t* p, F32 (&out)[kVectors]) {
  if constexpr (kBits == 8) {
    for (int v = 0; v < kVectors; ++v) out[v] = __builtin_convertvector(bytes(p + v * kWidth), F32);
  } else {
    // Each lane gets a word that holds its value, and moves it to the lowest bits.
    constexpr int kPeriod = kWidth > 4 && kBits <= 4 ? 8 : 4;  // values that a word of 32 bits is used for
    const U32 by = shifts<kBits, kPeriod>(std::make_integer_sequence<int, kWidth>());
    U32 words[kVectors] = {};
    for (int i = 0; i < kUnit; i += 8) {
      const std::uint64_t bits = eight<kBits>(p + i / 8 * kBits);
      const auto low = static_cast<std::uint32_t>(bits), high = static_cast<std::uint32_t>(bits >> (4 * kBits));
      eights(low, kPeriod == 8 ? low : high, i, words);
    }
    for (int v = 0; v < kVectors; ++v) {
      const U32 values = (words[v] >> by) & static_cast<std::uint32_t>((1 << kBits) - 1);
      out[v] = __builtin_convertvector((I32)values, F32);
    }
  }
}

inline float widen(std::uint16_t bits, Float type) {
  std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  if (type == Float::kF16) {
    // 2^112 moves a half's exponent to a float's; subnormals come out right too, and infinities are not to be met
    word = (static_cast<std::uint32_t>(bits & 0x8000) << 16) | (static_cast<std::uint32_t>(bits & 0x7FFF) << 13);
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value * 0x1p112F;
  }
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// n floats that begin at index `at` of `from`: themselves, or widened into `to`.
inline const float* widened(const void* from, std::size_t at, int n, Float type, float* to) {
  if (type == Float::kF32) return static_cast<const float*>(from) + at;
  const auto* halves = static_cast<const std::uint16_t*>(from) + at;
  if (type == Float::kBF16)
    for (int i = 0; i < n; ++i) to[i] = widen(halves[i], Float::kBF16);
  else
    for (int i = 0; i < n; ++i) to[i] = widen(halves[i], Float::kF16);
  return to;
}

struct Tile {
  const std::uint8_t* w;  // of the first output
  std::size_t row_bytes;
  const float* scales[kOutputTile];
  const float* biases[kOutputTile];
  int n_groups, group;
};

// Ask for `n` bytes of each output's weights, `ahead` of where it stands: a row is too short for the processor to see that
// the next one follows. Past the end of the matrix nothing happens.
template <int kOutputs>
inline void fetch_ahead(const std::uint8_t* const* w, std::size_t ahead, int n) {
  for (int o = 0; o < kOutputs; ++o)
    for (int i = 0; i < n; i += kLineBytes) __builtin_prefetch(w[o] + ahead + i);
}

// kRows rows by kOutputs outputs, from the tile's output `first` on.
template <int kBits, int kRows, int kOutputs>
void tile(const Tile& t, int first, const float* const* x, const float* const* sums, float* y,
          std::ptrdiff_t y_stride) {
  F32 total[kRows][kOutputs] = {};
  const std::uint8_t* w[kOutputs];
  for (int o = 0; o < kOutputs; ++o) w[o] = t.w + (first + o) * t.row_bytes;
  for (int g = 0, k = 0; g < t.n_groups; ++g) {
    F32 part[kRows][kOutputs] = {};
    if constexpr (kRows <= 2) fetch_ahead<kOutputs>(w, kOutputTile * t.row_bytes, t.group * kBits / 8);
    for (const int end = k + t.group; k < end; k += kUnit) {
      for (int o = 0; o < kOutputs; ++o) {
        F32 q[kVectors];
        unpack<kBits>(w[o], q);
        w[o] += kUnit * kBits / 8;
        for (int v = 0; v < kVectors; ++v)
          for (int r = 0; r < kRows; ++r) part[r][o] = fma(q[v], load(x[r] + k + v * kWidth), part[r][o]);
      }
    }
    for (int o = 0; o < kOutputs; ++o)
      for (int r = 0; r < kRows; ++r) total[r][o] = fma(part[r][o], all(t.scales[first + o][g]), total[r][o]);
  }
  const int whole = t.n_groups / kWidth * kWidth;
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOutputs; ++o) {
      for (int g = 0; g < whole; g += kWidth)
        total[r][o] = fma(load(t.biases[first + o] + g), load(sums[r] + g), total[r][o]);
      float sum = add_lanes(total[r][o]);
      for (int g = whole; g < t.n_groups; ++g) sum += t.biases[first + o][g] * sums[r][g];
      y[r * y_stride + o] = sum;
    }
  }
}

// kRows rows by kOutputs outputs, in parts whose sums stay in registers.
template <int kBits, int kRows, int kOutputs>
inline void tiles(const Tile& t, const Rows& rows, int r, float* y, std::ptrdiff_t y_stride) {
  constexpr int kPart = kRows > 2 && kOutputs > 2 ? 2 : kOutputs;
  for (int o = 0; o < kOutputs; o += kPart)
    tile<kBits, kRows, kPart>(t, o, rows.x + r, rows.sums + r, y + r * y_stride + o, y_stride);
}

template <int kBits, int kOutputs>
void outputs(const Tile& t, const Rows& rows, int first, int last, float* y, std::ptrdiff_t y_stride) {
  int r = first;
  for (; r + 4 <= last; r += 4) tiles<kBits, 4, kOutputs>(t, rows, r, y, y_stride);
  if (last - r == 3) tiles<kBits, 3, kOutputs>(t, rows, r, y, y_stride);
  if (last - r == 2) tiles<kBits, 2, kOutputs>(t, rows, r, y, y_stride);
  if (last - r == 1) tiles<kBits, 1, kOutputs>(t, rows, r, y, y_stride);
}

template <int kBits>
void linear_of(const QuantMatrix& m, int begin, int end, const Rows& rows, float* y, std::ptrdiff_t y_stride,
               float* scratch) {
  Tile t{};
  t.row_bytes = m.row_bytes();
  t.n_groups = m.n_groups();
  t.group = m.group;
  for (int first = 0; first < rows.n; first += kRowBlock) {
    const int last = first + kRowBlock < rows.n ? first + kRowBlock : rows.n;
    for (int o = begin; o < end; o += kOutputTile) {
      const int n = end - o < kOutputTile ? end - o : kOutputTile;
      t.w = m.w + o * t.row_bytes;
      for (int i = 0; i < n; ++i) {
        const std::size_t at = static_cast<std::size_t>(o + i) * t.n_groups;
        t.scales[i] = widened(m.scales, at, t.n_groups, m.float_type, scratch + 2 * i * t.n_groups);
        t.biases[i] = widened(m.biases, at, t.n_groups, m.float_type, scratch + (2 * i + 1) * t.n_groups);
      }
      float* to = y + o - begin;
      if (n == kOutputTile) {
        outputs<kBits, kOutputTile>(t, rows, first, last, to, y_stride);
        continue;
      }
      for (int i = 0; i < n; ++i) {
        Tile one = t;
        one.w = t.w + i * t.row_bytes;
        one.scales[0] = t.scales[i];
        one.biases[0] = t.biases[i];
        outputs<kBits, 1>(one, rows, first, last, to + i, y_stride);
      }
    }
  }
}

void linear(const QuantMatrix& m, int begin, int end, const Rows& rows, float* y, std::ptrdiff_t y_stride,
            float* scratch) {
  switch (m.bits) {
    case 2:
      return linear_of<2>(m, begin, end, rows, y, y_stride, scratch);
    case 3:
      return linear_of<3>(m, begin, end, rows, y, y_stride, scratch);
    case 4:
      return linear_of<4>(m, begin, end, rows, y, y_stride, scratch);
    case 5:
      return linear_of<5>(m, begin, end, rows, y, y_stride, scratch);
    case 6:
      return linear_of<6>(m, begin, end, rows, y, y_stride, scratch);
    default:
      return linear_of<8>(m, begin, end, rows, y, y_stride, scratch);
  }
}

void group_sums(const float* x, int n, int group, float* sums) {
  for (int g = 0; g < n / group; ++g, x += group) {
    F32 sum = {};
    for (int k = 0; k < group; k += kWidth) sum += load(x + k);
    sums[g] = add_lanes(sum);
  }
}

// e ** x by 2 ** round(x / ln 2) and a polynomial for the rest; relative error below 2e-7.
// Source: Cephes, single precision.
inline F32 exp(F32 x) {
  const F32 low = all(-87.3F), high = all(88.3F);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F32 magic = all(0x1.8p23F);  // adding it rounds to an integer
  const F32 n = fma(x, all(1.44269504F), magic) - magic;
  const F32 r = fma(n, all(2.12194440e-4F), fma(n, all(-0.693359375F), x));
  F32 p = all(1.9875691500e-4F);
  p = fma(p, r, all(1.3981999507e-3F));
  p = fma(p, r, all(8.3334519073e-3F));
  p = fma(p, r, all(4.1665795894e-2F));
  p = fma(p, r, all(1.6666665459e-1F));
  p = fma(p, r, all(5.0000001201e-1F));
  p = fma(p, r * r, r) + 1.0F;
  const I32 power = (__builtin_convertvector(n, I32) + 127) << 23;
  return p * (F32)power;
}

inline F32 gated(F32 gate, F32 up) { return gate / (1.0F + exp(-gate)) * up; }

void swiglu(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, gated(load(gate + i), load(up + i)));
  if (i == n) return;
  float g[kWidth] = {}, u[kWidth] = {}, o[kWidth];
  std::memcpy(g, gate + i, (n - i) * sizeof(float));
  std::memcpy(u, up + i, (n - i) * sizeof(float));
  store(o, gated(load(g), load(u)));
  std::memcpy(out + i, o, (n - i) * sizeof(float));
}

}  // namespace
}  // namespace sparkle
