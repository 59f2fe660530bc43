// Elements of 16 bits, two in a word, the first one in the low half.
#include <tl_templates/cuda/common.h>

namespace flashqla {
// A bf16 is the high half of a float: written as a conversion, it takes one more instruction.
template <typename Element> __device__ __forceinline__ float2 two_floats(unsigned raw) {
  if constexpr (std::is_same_v<Element, bfloat16_t>) return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
  const Element* values = reinterpret_cast<const Element*>(&raw);
  return make_float2(float(values[0]), float(values[1]));
}
template <typename Element> __device__ __forceinline__ unsigned pack(float x, float y) {
  const Element pair[2] = {Element(x), Element(y)};
  return *reinterpret_cast<const unsigned*>(pair);
}
}  // namespace flashqla
