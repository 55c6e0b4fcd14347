// <limits>, <type_traits>, <utility>, <algorithm>, <array> and <functional> for NVRTC: what device code uses
// of them.
#pragma once
#include "floats.h"
#include "integers.h"
#include "limits.h"
#include "math.h"
namespace std {
template <typename T_, T_ V_>
struct integral_constant {
    static constexpr T_ value = V_;
    typedef T_ value_type;
    typedef integral_constant type;
    constexpr operator T_() const noexcept { return V_; }
    constexpr T_ operator()() const noexcept { return V_; }
};
template <bool V_>
using bool_constant = integral_constant<bool, V_>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool C_, typename T_ = void>
struct enable_if {};
template <typename T_>
struct enable_if<true, T_> {
    typedef T_ type;
};
template <bool C_, typename T_, typename F_>
struct conditional {
    typedef T_ type;
};
template <typename T_, typename F_>
struct conditional<false, T_, F_> {
    typedef F_ type;
};
template <typename...>
using void_t = void;
template <typename A_, typename B_>
struct is_same : false_type {};
template <typename A_>
struct is_same<A_, A_> : true_type {};

#define CUKERN_TRANSFORM(name, from, to) \
    template <typename T_>               \
    struct name<from> {                  \
        typedef to type;                 \
    };
#define CUKERN_SAME(name)  \
    template <typename T_> \
    struct name {          \
        typedef T_ type;   \
    };
CUKERN_SAME(remove_const)
CUKERN_TRANSFORM(remove_const, const T_, T_)
CUKERN_SAME(remove_volatile)
CUKERN_TRANSFORM(remove_volatile, volatile T_, T_)
CUKERN_SAME(remove_reference)
CUKERN_TRANSFORM(remove_reference, T_&, T_)
CUKERN_TRANSFORM(remove_reference, T_&&, T_)
CUKERN_SAME(remove_pointer)
CUKERN_TRANSFORM(remove_pointer, T_*, T_)
CUKERN_TRANSFORM(remove_pointer, T_* const, T_)
template <typename T_>
struct remove_cv : remove_const<typename remove_volatile<T_>::type> {};
template <typename T_>
struct add_const {
    typedef const T_ type;
};
template <typename T_>
struct add_pointer {
    typedef typename remove_reference<T_>::type* type;
};
template <typename T_>
struct decay {  // of types that are no arrays and no functions
    typedef typename remove_cv<typename remove_reference<T_>::type>::type type;
};
template <typename T_, size_t N_>
struct decay<T_ (&)[N_]> {
    typedef T_* type;
};
template <typename T_>
T_&& declval() noexcept;
template <typename T_>
struct underlying_type {
    typedef __underlying_type(T_) type;
};

#define CUKERN_IS(name, ...) \
    template <typename T_>   \
    struct name : bool_constant<(__VA_ARGS__)> {};
#define CUKERN_ONE(name, T_) \
    template <>              \
    struct name<T_> : true_type {};
template <typename T_>
struct integral_ : false_type {};
CUKERN_ONE(integral_, bool)
CUKERN_ONE(integral_, char)
CUKERN_ONE(integral_, signed char)
CUKERN_ONE(integral_, unsigned char)
CUKERN_ONE(integral_, wchar_t)
CUKERN_ONE(integral_, char16_t)
CUKERN_ONE(integral_, char32_t)
CUKERN_ONE(integral_, short)
CUKERN_ONE(integral_, unsigned short)
CUKERN_ONE(integral_, int)
CUKERN_ONE(integral_, unsigned int)
CUKERN_ONE(integral_, long)
CUKERN_ONE(integral_, unsigned long)
CUKERN_ONE(integral_, long long)
CUKERN_ONE(integral_, unsigned long long)
template <typename T_>
struct floating_ : false_type {};
CUKERN_ONE(floating_, float)
CUKERN_ONE(floating_, double)
CUKERN_ONE(floating_, long double)
template <typename T_>
struct pointer_ : false_type {};
template <typename T_>
struct pointer_<T_*> : true_type {};
template <typename T_, bool = integral_<T_>::value || floating_<T_>::value>
struct negative_ : false_type {};
template <typename T_>
struct negative_<T_, true> : bool_constant<(T_(-1) < T_(0))> {};
template <typename T_>
struct is_const : false_type {};
template <typename T_>
struct is_const<const T_> : true_type {};
template <typename T_>
struct is_reference : false_type {};
template <typename T_>
struct is_reference<T_&> : true_type {};
template <typename T_>
struct is_reference<T_&&> : true_type {};
CUKERN_IS(is_integral, integral_<typename remove_cv<T_>::type>::value)
CUKERN_IS(is_floating_point, floating_<typename remove_cv<T_>::type>::value)
CUKERN_IS(is_pointer, pointer_<typename remove_cv<T_>::type>::value)
CUKERN_IS(is_arithmetic, is_integral<T_>::value || is_floating_point<T_>::value)
CUKERN_IS(is_signed, negative_<typename remove_cv<T_>::type>::value)
CUKERN_IS(is_unsigned, is_arithmetic<T_>::value && !negative_<typename remove_cv<T_>::type>::value)
CUKERN_IS(is_void, is_same<typename remove_cv<T_>::type, void>::value)
CUKERN_IS(is_enum, __is_enum(T_))
CUKERN_IS(is_class, __is_class(T_))
CUKERN_IS(is_union, __is_union(T_))
CUKERN_IS(is_empty, __is_empty(T_))
CUKERN_IS(is_trivially_copyable, __is_trivially_copyable(T_))
template <typename A_, typename B_>
struct is_base_of : bool_constant<__is_base_of(A_, B_)> {};
template <typename A_, typename B_>
struct is_convertible : bool_constant<__is_convertible_to(A_, B_)> {};

#define CUKERN_VALUE(name) \
    template <typename T_> \
    inline constexpr bool name##_v = name<T_>::value;
CUKERN_VALUE(is_const)
CUKERN_VALUE(is_reference)
CUKERN_VALUE(is_integral)
CUKERN_VALUE(is_floating_point)
CUKERN_VALUE(is_pointer)
CUKERN_VALUE(is_arithmetic)
CUKERN_VALUE(is_signed)
CUKERN_VALUE(is_unsigned)
CUKERN_VALUE(is_void)
CUKERN_VALUE(is_enum)
CUKERN_VALUE(is_class)
CUKERN_VALUE(is_empty)
CUKERN_VALUE(is_trivially_copyable)
template <typename A_, typename B_>
inline constexpr bool is_same_v = is_same<A_, B_>::value;
template <typename A_, typename B_>
inline constexpr bool is_base_of_v = is_base_of<A_, B_>::value;
template <typename A_, typename B_>
inline constexpr bool is_convertible_v = is_convertible<A_, B_>::value;
template <bool C_, typename T_ = void>
using enable_if_t = typename enable_if<C_, T_>::type;
template <bool C_, typename T_, typename F_>
using conditional_t = typename conditional<C_, T_, F_>::type;
#define CUKERN_TYPE(name)  \
    template <typename T_> \
    using name##_t = typename name<T_>::type;
CUKERN_TYPE(remove_const)
CUKERN_TYPE(remove_volatile)
CUKERN_TYPE(remove_cv)
CUKERN_TYPE(remove_reference)
CUKERN_TYPE(remove_pointer)
CUKERN_TYPE(add_const)
CUKERN_TYPE(add_pointer)
CUKERN_TYPE(decay)
CUKERN_TYPE(underlying_type)
template <typename T_>
struct make_unsigned;
template <typename T_>
struct make_signed;
#define CUKERN_SIGNS(T_)                \
    template <>                         \
    struct make_unsigned<T_> {          \
        typedef unsigned T_ type;       \
    };                                  \
    template <>                         \
    struct make_unsigned<unsigned T_> { \
        typedef unsigned T_ type;       \
    };                                  \
    template <>                         \
    struct make_signed<T_> {            \
        typedef signed T_ type;         \
    };                                  \
    template <>                         \
    struct make_signed<unsigned T_> {   \
        typedef signed T_ type;         \
    };
CUKERN_SIGNS(char)
CUKERN_SIGNS(short)
CUKERN_SIGNS(int)
CUKERN_SIGNS(long)
CUKERN_SIGNS(long long)
CUKERN_TYPE(make_unsigned)
CUKERN_TYPE(make_signed)
template <typename T_, T_... I_>
struct integer_sequence {
    static constexpr size_t size() noexcept { return sizeof...(I_); }
};
template <size_t... I_>
using index_sequence = integer_sequence<size_t, I_...>;
template <size_t N_, size_t... I_>
struct sequence_ : sequence_<N_ - 1, N_ - 1, I_...> {};
template <size_t... I_>
struct sequence_<0, I_...> {
    typedef index_sequence<I_...> type;
};
template <size_t N_>
using make_index_sequence = typename sequence_<N_>::type;

template <typename T_>
constexpr const T_& max(const T_& a, const T_& b) {
    return a < b ? b : a;
}
template <typename T_>
constexpr const T_& min(const T_& a, const T_& b) {
    return b < a ? b : a;
}
template <typename T_>
constexpr const T_& clamp(const T_& v, const T_& low, const T_& high) {
    return v < low ? low : high < v ? high : v;
}
template <typename T_>
constexpr void swap(T_& a, T_& b) {
    T_ c = static_cast<T_&&>(a);
    a = static_cast<T_&&>(b);
    b = static_cast<T_&&>(c);
}
template <typename A_, typename B_>
struct pair {
    typedef A_ first_type;
    typedef B_ second_type;
    A_ first;
    B_ second;
    constexpr pair() : first(), second() {}
    constexpr pair(const A_& a, const B_& b) : first(a), second(b) {}
};
template <typename A_, typename B_>
constexpr pair<typename decay<A_>::type, typename decay<B_>::type> make_pair(A_&& a, B_&& b) {
    return {a, b};
}
template <typename T_, size_t N_>
struct array {
    T_ _M_elems[N_];
    typedef T_ value_type;
    constexpr T_& operator[](size_t i) { return _M_elems[i]; }
    constexpr const T_& operator[](size_t i) const { return _M_elems[i]; }
    constexpr T_* data() { return _M_elems; }
    constexpr const T_* data() const { return _M_elems; }
    constexpr T_* begin() { return _M_elems; }
    constexpr const T_* begin() const { return _M_elems; }
    constexpr T_* end() { return _M_elems + N_; }
    constexpr const T_* end() const { return _M_elems + N_; }
    static constexpr size_t size() { return N_; }
};
#define CUKERN_OPERATION(name, sign)                                                   \
    template <typename T_ = void>                                                      \
    struct name {                                                                      \
        constexpr auto operator()(const T_& a, const T_& b) const { return a sign b; } \
    };
CUKERN_OPERATION(plus, +)
CUKERN_OPERATION(minus, -)
CUKERN_OPERATION(multiplies, *)
CUKERN_OPERATION(less, <)
CUKERN_OPERATION(greater, >)

enum float_round_style { round_toward_zero = 0, round_to_nearest = 1 };
template <typename T_>
struct numeric_limits {
    static constexpr bool is_specialized = false, is_signed = false, is_integer = false, is_exact = false,
                          has_infinity = false;
    static constexpr bool has_quiet_NaN = false;
    static constexpr int digits = 0, digits10 = 0;
    static constexpr T_ min() noexcept { return T_(); }
    static constexpr T_ max() noexcept { return T_(); }
    static constexpr T_ lowest() noexcept { return T_(); }
    static constexpr T_ epsilon() noexcept { return T_(); }
    static constexpr T_ infinity() noexcept { return T_(); }
    static constexpr T_ quiet_NaN() noexcept { return T_(); }
    static constexpr T_ denorm_min() noexcept { return T_(); }
};
template <typename T_>
struct numeric_limits<const T_> : numeric_limits<T_> {};
#define CUKERN_LIMITS(T_, smallest, largest, negative, bits)                                  \
    template <>                                                                               \
    struct numeric_limits<T_> {                                                               \
        static constexpr bool is_specialized = true, is_signed = negative, is_integer = true; \
        static constexpr bool is_exact = true, has_infinity = false, has_quiet_NaN = false;   \
        static constexpr int digits = bits, digits10 = bits * 643L / 2136, radix = 2;         \
        static constexpr T_ min() noexcept { return smallest; }                               \
        static constexpr T_ max() noexcept { return largest; }                                \
        static constexpr T_ lowest() noexcept { return smallest; }                            \
        static constexpr T_ epsilon() noexcept { return 0; }                                  \
        static constexpr T_ infinity() noexcept { return 0; }                                 \
        static constexpr T_ quiet_NaN() noexcept { return 0; }                                \
        static constexpr T_ denorm_min() noexcept { return 0; }                               \
    };
CUKERN_LIMITS(bool, false, true, false, 1)
CUKERN_LIMITS(char, CHAR_MIN, CHAR_MAX, true, 7)
CUKERN_LIMITS(signed char, SCHAR_MIN, SCHAR_MAX, true, 7)
CUKERN_LIMITS(unsigned char, 0, UCHAR_MAX, false, 8)
CUKERN_LIMITS(short, SHRT_MIN, SHRT_MAX, true, 15)
CUKERN_LIMITS(unsigned short, 0, USHRT_MAX, false, 16)
CUKERN_LIMITS(int, INT_MIN, INT_MAX, true, 31)
CUKERN_LIMITS(unsigned int, 0, UINT_MAX, false, 32)
CUKERN_LIMITS(long, LONG_MIN, LONG_MAX, true, 63)
CUKERN_LIMITS(unsigned long, 0, ULONG_MAX, false, 64)
CUKERN_LIMITS(long long, LLONG_MIN, LLONG_MAX, true, 63)
CUKERN_LIMITS(unsigned long long, 0, ULLONG_MAX, false, 64)
#define CUKERN_FLOAT_LIMITS(T_, name)                                                          \
    template <>                                                                                \
    struct numeric_limits<T_> {                                                                \
        static constexpr bool is_specialized = true, is_signed = true, is_integer = false;     \
        static constexpr bool is_exact = false, has_infinity = true, has_quiet_NaN = true;     \
        static constexpr bool is_iec559 = true;                                                \
        static constexpr int digits = name##_MANT_DIG, digits10 = name##_DIG, radix = 2;       \
        static constexpr int max_digits10 = name##_DECIMAL_DIG, max_exponent = name##_MAX_EXP; \
        static constexpr int min_exponent = name##_MIN_EXP;                                    \
        static constexpr T_ min() noexcept { return name##_MIN; }                              \
        static constexpr T_ max() noexcept { return name##_MAX; }                              \
        static constexpr T_ lowest() noexcept { return -name##_MAX; }                          \
        static constexpr T_ epsilon() noexcept { return name##_EPSILON; }                      \
        static constexpr T_ infinity() noexcept { return INFINITY; }                           \
        static constexpr T_ quiet_NaN() noexcept { return NAN; }                               \
        static constexpr T_ denorm_min() noexcept { return name##_TRUE_MIN; }                  \
    };
CUKERN_FLOAT_LIMITS(float, FLT)
CUKERN_FLOAT_LIMITS(double, DBL)
}  // namespace std
