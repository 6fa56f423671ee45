/* Max pooling over 2 × 2 windows; see pooling.py. */
#include <stdint.h>
#include <string.h>

/* The first of the largest of four numbers, or a NaN, as torch has it; and which of the four it is. */
#define LARGER(v, w, x, number) { float b = x; if ((b > v) | (b != b)) v = b, w = number; }

static inline void forward1(const float *top, const float *low, long c, float *out, uint8_t *which) {
  float v = *top;
  uint8_t w = 0;
  LARGER(v, w, top[c], 1)
  LARGER(v, w, low[0], 2)
  LARGER(v, w, low[c], 3)
  *out = v, *which = w;
}

static inline void backward1(const float *slope, const uint8_t *which, long c, float *top, float *low) {
  top[0] = *which == 0 ? *slope : 0, top[c] = *which == 1 ? *slope : 0;
  low[0] = *which == 2 ? *slope : 0, low[c] = *which == 3 ? *slope : 0;
}

/* The same for V windows at once: V channels of one place, or V places of one plane. Vectors are written out because
   compilers unroll the short loops instead. */
#define WINDOWS(V, EVEN, ODD, FIRST, SECOND) \
typedef float f##V __attribute__((vector_size(4 * V), aligned(4), may_alias)); \
typedef int32_t i##V __attribute__((vector_size(4 * V), aligned(4), may_alias)); \
typedef uint8_t u##V __attribute__((vector_size(V), aligned(1), may_alias)); \
static inline void larger##V(f##V *v, i##V *w, f##V x, int32_t number) { \
  i##V t = (x > *v) | (x != x); \
  *v = (f##V)(((i##V)x & t) | ((i##V)*v & ~t)); \
  *w = (t & number) | (*w & ~t); \
} \
static inline void largest##V(f##V a, f##V b, f##V c, f##V d, float *out, uint8_t *which) { \
  i##V w = {0}; \
  larger##V(&a, &w, b, 1); \
  larger##V(&a, &w, c, 2); \
  larger##V(&a, &w, d, 3); \
  *(f##V *)out = a; \
  *(u##V *)which = __builtin_convertvector(w, u##V); \
} \
static inline void forward##V(const float *top, const float *low, long c, float *out, uint8_t *which) { \
  largest##V(*(f##V *)top, *(f##V *)(top + c), *(f##V *)low, *(f##V *)(low + c), out, which); \
} \
static inline void backward##V(const float *slope, const uint8_t *which, long c, float *top, float *low) { \
  i##V s = *(i##V *)slope, w = __builtin_convertvector(*(u##V *)which, i##V); \
  *(i##V *)top = s & (w == 0), *(i##V *)(top + c) = s & (w == 1); \
  *(i##V *)low = s & (w == 2), *(i##V *)(low + c) = s & (w == 3); \
} \
static inline void plane_forward##V(const float *top, const float *low, float *out, uint8_t *which) { \
  f##V a = *(f##V *)top, b = *(f##V *)(top + V), c = *(f##V *)low, d = *(f##V *)(low + V); \
  largest##V(__builtin_shufflevector(a, b, EVEN), __builtin_shufflevector(a, b, ODD), \
             __builtin_shufflevector(c, d, EVEN), __builtin_shufflevector(c, d, ODD), out, which); \
} \
static inline void plane_backward##V(const float *slope, const uint8_t *which, float *top, float *low) { \
  i##V s = *(i##V *)slope, w = __builtin_convertvector(*(u##V *)which, i##V); \
  i##V a = s & (w == 0), b = s & (w == 1), c = s & (w == 2), d = s & (w == 3); \
  *(i##V *)top = __builtin_shufflevector(a, b, FIRST), *(i##V *)(top + V) = __builtin_shufflevector(a, b, SECOND); \
  *(i##V *)low = __builtin_shufflevector(c, d, FIRST), *(i##V *)(low + V) = __builtin_shufflevector(c, d, SECOND); \
}
#define LIST(...) __VA_ARGS__
WINDOWS(16, LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
            LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31),
            LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
            LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
WINDOWS(8, LIST(0, 2, 4, 6, 8, 10, 12, 14), LIST(1, 3, 5, 7, 9, 11, 13, 15),
           LIST(0, 8, 1, 9, 2, 10, 3, 11), LIST(4, 12, 5, 13, 6, 14, 7, 15))
WINDOWS(4, LIST(0, 2, 4, 6), LIST(1, 3, 5, 7), LIST(0, 4, 1, 5), LIST(2, 6, 3, 7))

/* DO for k = 0, V, 2V … below n; the last V overlap those before, so that none are left over. */
#define BY(V, n, DO) for (long k = 0; k < n; k += V) { if (k > n - V) k = n - V; DO; }

/* Images of h × w pixels with c numbers each. Of planes, as in the contiguous layout, c is 1. */
void forward(const float *restrict x, float *restrict out, uint8_t *restrict which, long n, long h, long w, long c) {
  long half = w / 2;
  for (long i = 0; i < n; ++i)
    for (long y = 0; y < h / 2; ++y) {
      const float *top = x + (i * h + 2 * y) * w * c, *low = top + w * c;
      if (c > 1)
        for (long z = 0; z < half; ++z, top += 2 * c, low += 2 * c, out += c, which += c) {
#define F(V) BY(V, c, forward##V(top + k, low + k, c, out + k, which + k))
          if (c >= 16) F(16) else if (c >= 8) F(8) else if (c >= 4) F(4) else F(1)
        }
      else {
#define P(V) BY(V, half, plane_forward##V(top + 2 * k, low + 2 * k, out + k, which + k))
        if (half >= 16) P(16) else if (half >= 8) P(8) else if (half >= 4) P(4)
        else BY(1, half, forward1(top + 2 * k, low + 2 * k, 1, out + k, which + k))
        out += half, which += half;
      }
    }
}

void backward(const float *restrict slope, const uint8_t *restrict which, float *restrict x, long n, long h, long w,
              long c) {
  long half = w / 2;
  for (long i = 0; i < n; ++i, x += h * w * c) {
    for (long y = 0; y < h / 2; ++y) {
      float *top = x + 2 * y * w * c, *low = top + w * c;
      if (c > 1)
        for (long z = 0; z < half; ++z, top += 2 * c, low += 2 * c, slope += c, which += c) {
#define B(V) BY(V, c, backward##V(slope + k, which + k, c, top + k, low + k))
          if (c >= 16) B(16) else if (c >= 8) B(8) else if (c >= 4) B(4) else B(1)
        }
      else {
#define Q(V) BY(V, half, plane_backward##V(slope + k, which + k, top + 2 * k, low + 2 * k))
        if (half >= 16) Q(16) else if (half >= 8) Q(8) else if (half >= 4) Q(4)
        else BY(1, half, backward1(slope + k, which + k, 1, top + 2 * k, low + 2 * k))
        top += 2 * half, low += 2 * half, slope += half, which += half;
      }
      if (w % 2) memset(top, 0, c * sizeof(float)), memset(low, 0, c * sizeof(float));
    }
    if (h % 2) memset(x + (h - 1) * w * c, 0, w * c * sizeof(float));
  }
}
